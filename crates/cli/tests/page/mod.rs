//! A served page: the process that serves it, and requests to it.

#![allow(dead_code, reason = "not every test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use crate::command::fedproj;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};

/// A process that serves a page. It ends with the test.
pub struct Served {
    pub child: Child,
    pub address: String,
    /// What it writes after the address.
    pub log: BufReader<ChildStderr>,
}

impl Served {
    /// Runs a command until it writes the address of its page to stderr.
    pub fn start(folder: &Path, args: &[&str]) -> Self {
        let mut child = fedproj(folder, args).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            assert!(log.read_line(&mut line).unwrap() > 0, "no address in {line}");
            if let Some((_, rest)) = line.split_once("http://") {
                break rest.split_whitespace().next().unwrap().to_owned();
            }
        };
        Self { child, address, log }
    }

    /// Asks for a path; the answer is read to its end by the caller.
    pub fn request(&self, path: &str, host: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
        BufReader::new(stream)
    }

    /// The answer to a request, head and body.
    pub fn get(&self, path: &str) -> String {
        let mut answer = String::new();
        self.request(path, "localhost").read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        answer
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next event with data of a stream of events.
pub fn next_event(stream: &mut impl BufRead) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the stream has ended");
        if let Some(data) = line.strip_prefix("data: ") {
            return data.to_owned();
        }
    }
}
