//! Whatever lies in a file, reading it gives a data set or an error, never a panic.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic too")]

use fedproj_data::{SourceConfig, load, load_texts};
use proptest::prelude::*;

/// Whether a file of these bytes is read. For damaged bytes only that it returns matters; the readers' own tests say what.
fn is_read(name: &str, files: &[&str], bytes: &[u8]) -> bool {
    let dir = tempfile::tempdir().unwrap();
    for file in files {
        let path = dir.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let path = match name {
        "mnist" => None,
        "folder" => Some(".".into()),
        _ => Some(files[0].into()),
    };
    let config = SourceConfig { path, ..SourceConfig::named(name) };
    match name {
        "text" => load_texts(&config, Some(dir.path())).is_ok(),
        _ => load(&config, Some(dir.path())).is_ok(),
    }
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

const CSV: &[u8] = b"x,y,kind\n1,2,a\n3.5,-4e3,\"b\"\n";
const TEXTS: &[u8] = b"label,text\n\"0\",\"a \"\"b\"\"\nc\"\n1,d\n";

#[test]
fn undamaged_files_are_read() {
    assert!(is_read("numpy", &["a.npy"], &npy()));
    assert!(is_read("csv", &["a.csv"], CSV));
    assert!(is_read("text", &["a.csv"], TEXTS));
    assert!(is_read("folder", &["class/a.png", "other/a.png"], &png()));
    assert!(is_read("folder", &["class/a.jpg", "other/a.jpg"], JPEG));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn numpy_files(bytes in damaged(npy())) {
        for file in ["a.npy", "a.npz"] {
            is_read("numpy", &[file], &bytes);
        }
    }

    #[test]
    fn csv_files(bytes in damaged(CSV.to_vec())) {
        is_read("csv", &["a.csv"], &bytes);
    }

    #[test]
    fn text_files(bytes in damaged(TEXTS.to_vec())) {
        for file in ["a.csv", "a.tsv", "a.jsonl"] {
            is_read("text", &[file], &bytes);
        }
    }

    #[test]
    fn image_files(png in damaged(png()), jpeg in damaged(JPEG.to_vec())) {
        is_read("folder", &["class/a.png"], &png);
        is_read("folder", &["class/a.jpg"], &jpeg);
    }

    #[test]
    fn idx_files(bytes in damaged(vec![0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 2, 3, 4])) {
        let files = ["train", "t10k"].map(|part| [format!("mnist/{part}-images-idx3-ubyte"), format!("mnist/{part}-labels-idx1-ubyte.gz")]);
        is_read("mnist", &files.as_flattened().iter().map(String::as_str).collect::<Vec<_>>(), &bytes);
    }
}
