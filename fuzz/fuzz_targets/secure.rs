//! What a node of a secure sum gets from its server: `cargo +nightly fuzz run secure`.
#![no_main]

#[path = "../../crates/net/tests/decode/mod.rs"]
mod decode;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decode::secure(bytes));
