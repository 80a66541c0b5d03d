//! Lists from a file: JSON (`[[0, 5], [1]]`) or text, one line of indices per client, separated by blanks or commas.
//!
//! Indices count from 0. No sample may be given twice; samples that nobody gets stay unused.

use std::path::Path;

use super::Partition;
use crate::error::{Error, Result};

pub(super) fn partition(path: &Path, n_samples: usize) -> Result<Partition> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let malformed = |line: usize, found: String| {
        let hint = "write JSON such as [[0, 5], [1]] or one line of indices per client";
        Error::malformed(path.display(), format!("line {line}"), "indices of samples, counted from 0", found, hint)
    };
    let lists = if text.trim_start().starts_with('[') {
        serde_json::from_str(&text).map_err(|e| malformed(e.line(), e.to_string()))?
    } else {
        let line = |(number, line): (usize, &str)| {
            let fields = line.split(|c: char| c.is_whitespace() || c == ',').filter(|f| !f.is_empty());
            let index = |f: &str| f.parse().map_err(|_| malformed(number + 1, format!("`{f}`")));
            fields.map(index).collect::<Result<Vec<u32>>>()
        };
        text.trim_end().lines().enumerate().map(line).collect::<Result<Vec<_>>>()?
    };
    Partition::from_lists("file", lists, n_samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Partition> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        partition(file.path(), 6)
    }

    #[test]
    fn json_and_text_agree() {
        let json = check("[[5, 0], [1]]").unwrap();
        assert_eq!(check("5, 0\n1\n").unwrap(), json);
        assert_eq!(*json.indices(0), [0, 5]);
    }

    #[test]
    fn mistakes_are_named() {
        let message = |text: &str| check(text).unwrap_err().to_string();
        assert!(message("0 1\n2 x\n").contains("line 2: expected indices of samples"));
        assert!(message("0 -1").contains("`-1`"));
        assert!(message("[[0, 1], [2,").contains("line 1"));
        assert!(message("[[0, 1], [2.5]]").contains("line 1"));
        assert!(message("0\n\n1").contains("client 1 holds no sample"));
        assert!(message("").contains("no client"));
        assert!(message("0 6").contains("sample 6, but there are only 6"));
        assert!(message("0 1\n1").contains("sample 1 is held by client 0 and again by client 1"));
    }
}
