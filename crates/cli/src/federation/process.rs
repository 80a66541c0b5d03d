//! Processes of this program that end with this one.

use anyhow::{Result, bail};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command};

/// A process of this program.
pub struct Process {
    name: String,
    log: PathBuf,
    pub child: Child,
    /// Kept here, because `Child::wait` closes the child's stdin.
    _stdin: Option<ChildStdin>,
}

impl Process {
    /// Starts a command that logs to a file. The name is for messages.
    pub fn start(name: String, command: &mut Command, log: PathBuf) -> Result<Self> {
        let mut child = command.stderr(File::create(&log)?).spawn()?;
        let stdin = child.stdin.take();
        Ok(Self { name, log, child, _stdin: stdin })
    }

    /// Fails if it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("{} ended: {status}: {}", self.name, self.last_words()),
            None => Ok(()),
        }
    }

    /// Waits for its end, and fails if it failed.
    pub fn finish(&mut self) -> Result<()> {
        let status = self.child.wait()?;
        if !status.success() {
            bail!("{} failed: {status}: {}", self.name, self.last_words());
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.lines().last().unwrap_or("no output").to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
