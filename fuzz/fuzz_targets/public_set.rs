//! Vectors and public data sets that come as blobs: `cargo +nightly fuzz run public_set`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fedproj_net::decoders::blobs(bytes));
