//! Vectors and public data sets that come as blobs: `cargo +nightly fuzz run public_set`.
#![no_main]

#[path = "../../crates/net/tests/decode/mod.rs"]
mod decode;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decode::blobs(bytes));
