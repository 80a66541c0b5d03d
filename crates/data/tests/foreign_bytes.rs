//! Whatever lies in a file, reading it gives a data set or an error, never a panic.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic too")]

use std::path::Path;

use fedproj_data::{SourceConfig, load};
use proptest::prelude::*;

fn read(dir: &Path, name: &str, file: &str) {
    let path = (!file.is_empty()).then(|| file.into());
    // Only that it returns matters here; the readers' own tests say what.
    let _ = load(&SourceConfig { path, ..SourceConfig::named(name) }, Some(dir));
}

fn npy() -> Vec<u8> {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1, 2, 3), }\n";
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.push(header.len() as u8);
    bytes.push(0);
    bytes.extend(header.as_bytes());
    bytes.extend([0; 48]);
    bytes
}

const JPEG: &[u8] = include_bytes!("images/colour.jpg");

fn png() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 3, 2);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&[1, 2, 3].repeat(6)).unwrap();
    bytes
}

/// Good bytes with a few changed and the end cut off, or no good bytes at all.
fn damaged(good: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let n = good.len();
    let mutated = (prop::collection::vec((0..n, any::<u8>()), 0..4), 0..=n).prop_map(move |(changes, n_kept)| {
        let mut bytes = good.clone();
        for (at, value) in changes {
            bytes[at] = value;
        }
        bytes.truncate(n_kept);
        bytes
    });
    prop_oneof![3 => mutated, 1 => prop::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn numpy_files(bytes in damaged(npy())) {
        let dir = tempfile::tempdir().unwrap();
        for file in ["a.npy", "a.npz"] {
            std::fs::write(dir.path().join(file), &bytes).unwrap();
            read(dir.path(), "numpy", file);
        }
    }

    #[test]
    fn csv_files(bytes in damaged(b"x,y,kind\n1,2,a\n3.5,-4e3,\"b\"\n".to_vec())) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.csv"), &bytes).unwrap();
        read(dir.path(), "csv", "a.csv");
    }

    #[test]
    fn text_files(bytes in damaged(b"label,text\n\"0\",\"a \"\"b\"\"\nc\"\n1,d\n".to_vec())) {
        let dir = tempfile::tempdir().unwrap();
        for file in ["a.csv", "a.tsv", "a.jsonl"] {
            std::fs::write(dir.path().join(file), &bytes).unwrap();
            let config = SourceConfig { path: Some(file.into()), ..SourceConfig::named("text") };
            let _ = fedproj_data::load_texts(&config, Some(dir.path()));
        }
    }

    #[test]
    fn image_files(png in damaged(png()), jpeg in damaged(JPEG.to_vec())) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("class")).unwrap();
        for (file, bytes) in [("class/a.png", &png), ("class/a.jpg", &jpeg)] {
            std::fs::write(dir.path().join(file), bytes).unwrap();
            read(dir.path(), "folder", ".");
            std::fs::remove_file(dir.path().join(file)).unwrap();
        }
    }

    #[test]
    fn idx_files(bytes in damaged(vec![0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 2, 3, 4])) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("mnist")).unwrap();
        for part in ["train", "t10k"] {
            std::fs::write(dir.path().join(format!("mnist/{part}-images-idx3-ubyte")), &bytes).unwrap();
            std::fs::write(dir.path().join(format!("mnist/{part}-labels-idx1-ubyte.gz")), &bytes).unwrap();
        }
        read(dir.path(), "mnist", "");
    }
}
