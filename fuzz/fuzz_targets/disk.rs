//! What is read back from disk, tokens and certificate requests: `cargo +nightly fuzz run disk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fedproj_net::decoders::disk(bytes));
