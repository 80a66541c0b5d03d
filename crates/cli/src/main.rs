//! The `fedproj` command.
fn main() {}
