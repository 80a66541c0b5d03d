//! Hints for mistyped names.

/// `\nhint: did you mean …?`, for an error message about an unknown name; empty if no known name is near.
pub fn did_you_mean<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    nearest(name, known).map(|known| format!("\nhint: did you mean `{known}`?")).unwrap_or_default()
}

/// The known name that a mistyped one probably means.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    near(name, known).first().copied()
}

/// Known names that a mistyped one may mean, nearest first. Hyphens count least: `resnet-8` means `resnet8`, not
/// `resnet18`.
pub(crate) fn near<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let plain = |s: &str| s.replace(['-', '_'], "").to_lowercase();
    let distance = |known: &str| (edit_distance(&plain(name), &plain(known)), edit_distance(name, known));
    let mut near: Vec<_> = known.map(|known| (distance(known), known)).collect();
    near.retain(|((letters, _), known)| *letters <= 2.min(known.len() / 2));
    near.sort_unstable();
    near.into_iter().map(|(_, known)| known).collect()
}

/// Insertions, deletions and replacements that turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_name_gets_the_nearest_one_and_a_strange_one_none() {
        let hint = |name| did_you_mean(name, ["resnet18", "resnet8", "cnn", "bert"].into_iter());
        assert_eq!(hint("resnet-8"), "\nhint: did you mean `resnet8`?");
        assert_eq!(hint("resnet9"), "\nhint: did you mean `resnet8`?");
        assert_eq!(hint("restet9"), "\nhint: did you mean `resnet8`?");
        // Two letters of three are too many.
        assert_eq!(hint("cat"), "");
        assert_eq!(hint("transformer"), "");
    }
}
