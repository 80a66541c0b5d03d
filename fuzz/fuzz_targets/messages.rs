//! Every message that comes over the network: `cargo +nightly fuzz run messages`.
#![no_main]

#[path = "../../crates/net/tests/decode/mod.rs"]
mod decode;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decode::messages(bytes));
