//! Where real data sets are.

use std::path::PathBuf;

/// The data directory, if it holds `folder`; otherwise says that the test does nothing.
pub fn data_dir(folder: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("FEDPROJ_DATA").map(PathBuf::from).filter(|dir| dir.join(folder).is_dir());
    if dir.is_none() {
        eprintln!("skipped: FEDPROJ_DATA is not set or holds no {folder}");
    }
    dir
}
