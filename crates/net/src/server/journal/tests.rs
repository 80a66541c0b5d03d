//! A journal that is written, changed, cut off and split into segments.

use super::*;

fn event(n: u32) -> Event {
    Event::RoundOpened { run: "r".into(), round: n, asked: vec![1, 2] }
}

fn read(dir: &Path) -> Result<Vec<Entry>> {
    let mut all = Vec::new();
    Journal::open(dir, &mut |e| all.push(e))?;
    Ok(all)
}

#[test]
fn events_come_back_in_order_and_two_writers_share_a_chain() {
    let dir = tempfile::tempdir().unwrap();
    let mut a = Journal::open(dir.path(), &mut |_| ()).unwrap();
    let mut b = Journal::open(dir.path(), &mut |_| ()).unwrap();
    for n in 0..6 {
        if n % 2 == 0 { &mut a } else { &mut b }.append(event(n)).unwrap();
    }
    let back = read(dir.path()).unwrap();
    assert_eq!(back.iter().map(|e| e.event.clone()).collect::<Vec<_>>(), (0..6).map(event).collect::<Vec<_>>());
    assert_eq!(b.tail().n_entries, 6);
}

#[test]
fn a_torn_last_line_is_dropped_wherever_it_is_torn_and_the_chain_continues() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
    journal.append(event(0)).unwrap();
    let one = std::fs::read(&path).unwrap().len();
    journal.append(event(1)).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for cut in one..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
        assert_eq!(journal.tail().n_entries, 1, "cut at {cut}");
        journal.append(event(7)).unwrap();
        assert_eq!(read(dir.path()).unwrap()[1].event, event(7));
    }
}

#[test]
fn a_changed_bit_in_the_last_entry_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
    (0..2).for_each(|n| journal.append(event(n)).unwrap());
    let whole = std::fs::read(&path).unwrap();
    let last = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
    for at in last..whole.len() - 1 {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        assert!(read(dir.path()).is_err(), "byte {}", at - last);
    }
}

#[test]
fn entries_of_earlier_versions_are_read_and_a_contribution_vouches_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let accepted = Event::Accepted(Contribution { run: "r".into(), n_samples: 10, ..Contribution::default() });
    let previous = "0".repeat(64);
    let entry = Entry { seq: 0, time: String::new(), previous, operator: None, event: accepted, check: None };
    let line = serde_json::to_string(&entry).unwrap() + "\n";
    std::fs::write(&path, &line).unwrap();
    assert_eq!(read(dir.path()).unwrap(), [entry]);
    std::fs::write(&path, line.replace("\"n_samples\":10", "\"n_samples\":90")).unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("has been changed"));
}

#[test]
fn a_changed_or_missing_entry_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
    (0..4).for_each(|n| journal.append(event(n)).unwrap());
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let changed = text.replacen("\"round\":1", "\"round\":9", 1);
    let missing = [lines[0], lines[2], lines[3]].join("\n") + "\n";
    let swapped = [lines[0], lines[2], lines[1], lines[3]].join("\n") + "\n";
    for damaged in [changed, missing, swapped] {
        std::fs::write(&path, damaged).unwrap();
        assert!(read(dir.path()).unwrap_err().to_string().contains("has been changed"));
    }
}

#[test]
fn a_journal_is_rotated_under_two_writers_and_its_chain_goes_through_all_segments() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Journal { segment_bytes_max: 600, ..Journal::open(dir.path(), &mut |_| ()).unwrap() };
    let (mut a, mut b) = (open(), open());
    for n in 0..40 {
        if n % 3 == 0 { &mut a } else { &mut b }.append(event(n)).unwrap();
    }
    let path = |name: &str| dir.path().join(name);
    let sizes: Vec<u64> = ["journal.jsonl", "journal-00001.jsonl", "journal-00002.jsonl"]
        .map(|name| std::fs::metadata(path(name)).unwrap().len())
        .into();
    assert!(sizes.iter().all(|n| (600..1000).contains(n)), "{sizes:?}");
    let all = read(dir.path()).unwrap();
    assert_eq!(all.iter().map(|e| e.event.clone()).collect::<Vec<_>>(), (0..40).map(event).collect::<Vec<_>>());
    let tail = Journal::read(dir.path(), &mut |_| Ok(())).unwrap().unwrap();
    assert_eq!((tail.n_entries, &tail), (40, open().tail()));
    // A segment that is missing in the middle, or one that was exchanged, is found.
    let second = std::fs::read(path("journal-00001.jsonl")).unwrap();
    std::fs::remove_file(path("journal-00001.jsonl")).unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("journal-00001.jsonl"));
    std::fs::write(path("journal-00001.jsonl"), &second[second.iter().position(|b| *b == b'\n').unwrap() + 1..])
        .unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("has been changed"));
    std::fs::write(path("journal-00001.jsonl"), &second).unwrap();
    // Old segments may be archived elsewhere; the rest is still a chain.
    std::fs::remove_file(path("journal.jsonl")).unwrap();
    let rest = read(dir.path()).unwrap();
    assert_eq!((rest[0].seq, rest.len()), (40 - rest.len() as u64, all.iter().filter(|e| rest.contains(e)).count()));
    assert_eq!(open().tail(), &tail);
}

#[test]
fn a_line_without_an_end_is_not_read_into_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("journal.jsonl")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("bytes without an end"));
}

#[test]
fn an_operator_is_part_of_the_chain_and_entries_without_one_stay_readable() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
    journal.append(event(0)).unwrap();
    journal.append_as(Some("alice".into()), event(1)).unwrap();
    journal.append(event(2)).unwrap();
    let operators: Vec<Option<String>> = read(dir.path()).unwrap().into_iter().map(|e| e.operator).collect();
    assert_eq!(operators, [None, Some("alice".to_owned()), None]);
    let path = dir.path().join("journal.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.lines().next().unwrap().contains("operator"));
    std::fs::write(&path, text.replace("alice", "mallory")).unwrap();
    assert!(read(dir.path()).is_err());
}
