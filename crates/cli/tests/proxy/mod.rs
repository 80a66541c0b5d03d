//! A bad network: forwards bytes in small pieces, and cuts each connection after a while.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use crate::federate::Chance;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub struct Proxy {
    pub address: SocketAddr,
    n_cut: Arc<AtomicU64>,
}

impl Proxy {
    /// Runs in front of a server until the test's process ends.
    pub fn start(server: SocketAddr, mut chance: Chance) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, n_cut) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
        let cut = Arc::clone(&n_cut);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let limits = [20_000 + chance.below(60_000), 20_000 + chance.below(60_000)];
                let pairs = [
                    (client.try_clone().unwrap(), server.try_clone().unwrap(), limits[0]),
                    (server, client, limits[1]),
                ];
                for (from, to, limit) in pairs {
                    let cut = Arc::clone(&cut);
                    std::thread::spawn(move || pass(from, to, limit, &cut));
                }
            }
        });
        Self { address, n_cut }
    }

    pub fn n_cut(&self) -> u64 {
        self.n_cut.load(Ordering::Relaxed)
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, limit: u64, n_cut: &AtomicU64) {
    let (mut piece, mut passed) = ([0; 1500], 0);
    while let Ok(n @ 1..) = from.read(&mut piece) {
        passed += n as u64;
        if passed > limit {
            n_cut.fetch_add(1, Ordering::Relaxed);
            break;
        }
        std::thread::sleep(Duration::from_micros(300));
        if to.write_all(&piece[..n]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
