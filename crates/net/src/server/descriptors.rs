//! Open files. Each connection needs one, and so does each file that the server reads or writes. When none is left the
//! server cannot even write its journal, so connections never get the last ones.

use crate::error::{Error, Result};

/// Kept for files: the 32 threads that may block hold a few each, the round loop and the journal some more.
const RESERVE: usize = 128;

/// The fewest connections with which a server makes sense.
const CONNECTIONS_MIN: usize = 32;

/// Max connections of strangers at a time, if the system allows this many: each is done within seconds.
const STRANGERS_MAX: usize = 512;

/// How many connections there may be at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Of strangers: before the handshake, at enrolment, on the status page. As many more may be about to close.
    pub strangers: usize,
    /// Of members.
    pub members: usize,
}

impl Shares {
    /// Divides what the system allows.
    ///
    /// # Errors
    /// If it allows too few open files.
    pub fn of(open_files_max: usize, connections_max: usize) -> Result<Self> {
        let connections = open_files_max.saturating_sub(RESERVE);
        if connections < CONNECTIONS_MIN {
            return Err(Error::config(format!(
                "the system allows this process {open_files_max} open files; a server needs {}\n\
                 hint: raise the limit, `ulimit -n 4096` or LimitNOFILE=4096 under systemd",
                RESERVE + CONNECTIONS_MIN
            )));
        }
        let strangers = STRANGERS_MAX.min(connections / 8);
        Ok(Self { strangers, members: connections_max.min(connections - 2 * strangers) })
    }
}

/// Raises the soft limit of open files to the hard limit, and returns it.
#[cfg(unix)]
pub(crate) fn raise_limit() -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_or(soft, |()| hard);
    usize::try_from(raised).unwrap_or(usize::MAX)
}

/// Other systems do not limit sockets and files together.
#[cfg(not(unix))]
pub(crate) fn raise_limit() -> usize {
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_never_get_the_last_open_files() {
        for open_files_max in [160, 256, 1024, 4096, 65_536, usize::MAX] {
            let Shares { strangers, members } = Shares::of(open_files_max, 4096).unwrap();
            assert!(strangers >= 4 && members >= 24 && 2 * strangers + members + RESERVE <= open_files_max);
            assert!(strangers <= STRANGERS_MAX && members <= 4096);
        }
        assert_eq!(Shares::of(65_536, 10).unwrap().members, 10);
        assert!(Shares::of(159, 4096).unwrap_err().to_string().contains("ulimit"));
    }
}
