//! Stored runs as TensorBoard's event files: records with checksums, each an `Event` in protobuf.

use anyhow::Result;
use fedproj_core::{RoundRecord, StoredRun, write_atomically};
use prost::Message;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

#[derive(Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Scalars>,
}

#[derive(Message)]
struct Scalars {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Optional, since protobuf leaves out a plain 0.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// Writes the event file of a run below `out`; its path. Steps are rounds, and every number of a round is a curve.
///
/// # Errors
/// If the run cannot be read or the file cannot be written.
pub fn export_tensorboard(run: &Path, out: &Path) -> Result<PathBuf> {
    let StoredRun { rounds, config, .. } = StoredRun::so_far(run)?;
    // A round's line has no time of day. The last was written when the file was.
    let written = std::fs::metadata(run.join("metrics.jsonl"))?.modified()?.duration_since(UNIX_EPOCH)?.as_secs_f64();
    let mut time = written - rounds.iter().map(|r| r.seconds.total()).sum::<f64>();
    let first = Event { wall_time: time, file_version: Some("brain.Event:2".into()), ..Event::default() };
    let mut bytes = record(&first);
    for round in &rounds {
        time += round.seconds.total();
        let summary = Some(Scalars { value: scalars(round)? });
        bytes.extend(record(&Event { wall_time: time, step: round.round.into(), summary, ..Event::default() }));
    }
    // Readers find files by this part of their name. The rest is fixed, so that a second export replaces the first.
    let path = out.join(format!("events.out.tfevents.{:010}.fedproj-{}", written as u64, config.seed));
    std::fs::create_dir_all(out)?;
    write_atomically(&path, &bytes)?;
    Ok(path)
}

/// Every number of a round under its name, and what is true or not as 1 or 0; those of a table under `table/name`.
fn scalars(round: &RoundRecord) -> Result<Vec<Scalar>> {
    fn collect(value: &Json, tag: &str, into: &mut Vec<Scalar>) {
        match value {
            Json::Object(table) => {
                for (key, value) in table {
                    collect(value, &if tag.is_empty() { key.clone() } else { format!("{tag}/{key}") }, into);
                }
            }
            // Whether ε is nominal: a curve of 1.
            Json::Bool(is_so) => {
                into.push(Scalar { tag: tag.to_owned(), simple_value: Some(f32::from(u8::from(*is_so))) });
            }
            Json::Number(number) if tag != "round" => {
                into.push(Scalar { tag: tag.to_owned(), simple_value: number.as_f64().map(|v| v as f32) });
            }
            _ => (),
        }
    }
    let mut all = Vec::new();
    collect(&serde_json::to_value(round)?, "", &mut all);
    Ok(all)
}

/// Length, its checksum, content, its checksum.
fn record(event: &Event) -> Vec<u8> {
    let content = event.encode_to_vec();
    let length = (content.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), &content, &masked_crc(&content).to_le_bytes()].concat()
}

/// CRC-32C, rotated and shifted as TensorFlow does: checksums of checksums would otherwise repeat.
fn masked_crc(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82F6_3B78;
    let crc = !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (REVERSED_POLYNOMIAL & 0u32.wrapping_sub(crc & 1)))
    });
    crc.rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_core::PrivacySpent;

    #[test]
    fn checksums_are_crc_32c() {
        // The check value of CRC-32C, RFC 3720 B.4, before the mask.
        let crc = masked_crc(b"123456789").wrapping_sub(0xA282_EAD8).rotate_left(15);
        assert_eq!(crc, 0xE306_9283);
    }

    #[test]
    fn numbers_of_a_round_are_curves_and_a_zero_is_one_too() {
        let round = RoundRecord { round: 3, accuracy: Some(0.5), per_class: Some(vec![1.0]), ..RoundRecord::default() };
        let scalars = scalars(&round).unwrap();
        let value = |tag: &str| scalars.iter().find(|s| s.tag == tag).map(|s| s.simple_value);
        assert_eq!((value("accuracy"), value("seconds/local")), (Some(Some(0.5)), Some(Some(0.0))));
        assert_eq!((value("loss"), value("per_class"), value("round")), (None, None, None));
    }

    #[test]
    fn epsilon_is_a_curve_and_so_is_whether_it_is_nominal() {
        for (nominal, mark) in [(true, 1.0), (false, 0.0)] {
            let spent = PrivacySpent { epsilon: 2.5, delta: 1e-5, nominal, clip: 1.0, clip_logits: None };
            let round = RoundRecord { privacy: Some(spent), ..RoundRecord::default() };
            let scalars = scalars(&round).unwrap();
            let value = |tag: &str| scalars.iter().find(|s| s.tag == tag).and_then(|s| s.simple_value);
            assert_eq!((value("privacy/epsilon"), value("privacy/nominal")), (Some(2.5), Some(mark)));
        }
    }
}
