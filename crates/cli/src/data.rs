//! Data.
use std::path::PathBuf;

/// The data directory: the flag, else $FEDPROJ_DATA, else `data` if it exists.
pub fn data_dir(flag: Option<PathBuf>) -> Option<PathBuf> {
    flag.or_else(|| std::env::var_os("FEDPROJ_DATA").map(PathBuf::from)).or_else(|| {
        let here = PathBuf::from("data");
        here.is_dir().then_some(here)
    })
}
