//! What is read back from disk, tokens and certificate requests: `cargo +nightly fuzz run disk`.
#![no_main]

#[path = "../../crates/net/tests/decode/mod.rs"]
mod decode;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decode::disk(bytes));
