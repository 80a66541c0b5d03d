//! Every message that comes over the network: `cargo +nightly fuzz run messages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fedproj_net::decoders::messages(bytes));
