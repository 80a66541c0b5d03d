//! As much of Python's pickle format as CIFAR's "python version" uses: dictionaries of byte strings, lists of numbers and
//! NumPy arrays of bytes.
//!
//! Nothing is executed: a class is a name here, and an object is its arguments and state.

use std::collections::BTreeMap;

/// A pickled value, as far as it is needed.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Mark,
    Int(i64),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// Anything else: a class, nothing, an object without its state.
    Other,
}

/// A batch of CIFAR in records: the labels of these names, then the pixels.
pub(super) fn records(bytes: &[u8], labels: &[&str]) -> Result<Vec<u8>, String> {
    let Value::Dict(entries) = Machine::default().run(bytes)? else { return Err("it is no dictionary".into()) };
    let entry = |name: &str| {
        let found = entries.iter().find(|(key, _)| *key == Value::Bytes(name.into()));
        found.map(|(_, value)| value).ok_or_else(|| format!("it has no `{name}`"))
    };
    let Value::Bytes(pixels) = entry("data")? else { return Err("`data` is no array of bytes".into()) };
    let labels: Vec<Vec<u8>> = labels.iter().map(|name| numbers(name, entry(name)?)).collect::<Result<_, String>>()?;
    let n = labels.first().map_or(0, Vec::len);
    if n == 0 || !pixels.len().is_multiple_of(n) || labels.iter().any(|column| column.len() != n) {
        return Err(format!("{n} labels for {} bytes of pixels", pixels.len()));
    }
    let mut records = Vec::with_capacity(pixels.len() + n * labels.len());
    for (at, image) in pixels.chunks_exact(pixels.len() / n).enumerate() {
        records.extend(labels.iter().map(|column| column[at]));
        records.extend_from_slice(image);
    }
    Ok(records)
}

/// A list of numbers of one byte each.
fn numbers(name: &str, value: &Value) -> Result<Vec<u8>, String> {
    let Value::List(items) = value else { return Err(format!("`{name}` is no list")) };
    let byte = |item: &Value| match item {
        Value::Int(v) => u8::try_from(*v).map_err(|_| format!("`{name}` holds {v}")),
        other => Err(format!("`{name}` holds {other:?}")),
    };
    items.iter().map(byte).collect()
}

/// The stack machine that a pickle is a program for.
#[derive(Default)]
struct Machine {
    stack: Vec<Value>,
    memo: BTreeMap<u32, Value>,
}

impl Machine {
    fn run(mut self, bytes: &[u8]) -> Result<Value, String> {
        let mut rest = bytes;
        loop {
            let [op] = take(&mut rest)?;
            match op {
                b'.' => return self.pop(),
                b'\x80' => drop(take::<1>(&mut rest)?),
                b'(' => self.stack.push(Value::Mark),
                b'}' => self.stack.push(Value::Dict(Vec::new())),
                b']' | b')' => self.stack.push(Value::List(Vec::new())),
                b'N' | b'\x88' | b'\x89' => self.stack.push(Value::Other),
                b'K' => self.push_int(u8::from_le_bytes(take(&mut rest)?)),
                b'M' => self.push_int(u16::from_le_bytes(take(&mut rest)?)),
                b'J' => self.push_int(i32::from_le_bytes(take(&mut rest)?)),
                b'U' => self.push_bytes(usize::from(u8::from_le_bytes(take(&mut rest)?)), &mut rest)?,
                b'T' | b'X' => self.push_bytes(u32::from_le_bytes(take(&mut rest)?) as usize, &mut rest)?,
                b'q' => self.remember(u32::from(u8::from_le_bytes(take(&mut rest)?)))?,
                b'r' => self.remember(u32::from_le_bytes(take(&mut rest)?))?,
                b'h' => self.recall(u32::from(u8::from_le_bytes(take(&mut rest)?)))?,
                b'j' => self.recall(u32::from_le_bytes(take(&mut rest)?))?,
                b'c' => {
                    line(&mut rest)?;
                    line(&mut rest)?;
                    self.stack.push(Value::Other);
                }
                op => self.combine(op)?,
            }
        }
    }

    /// The operations that make one value of others.
    fn combine(&mut self, op: u8) -> Result<(), String> {
        match op {
            b't' => {
                let items = self.up_to_mark()?;
                self.stack.push(Value::List(items));
            }
            b'\x85'..=b'\x87' => {
                let n = usize::from(op - b'\x84');
                let from = self.stack.len().checked_sub(n).ok_or("the stack is empty")?;
                let items = self.stack.split_off(from);
                self.stack.push(Value::List(items));
            }
            b'a' => {
                let item = self.pop()?;
                self.list()?.push(item);
            }
            b'e' => {
                let items = self.up_to_mark()?;
                self.list()?.extend(items);
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.dict()?.push((key, value));
            }
            b'u' => {
                let items = self.up_to_mark()?;
                let pairs = items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                let pairs: Vec<_> = pairs.collect();
                self.dict()?.extend(pairs);
            }
            // A call of a class with its arguments.
            b'R' => {
                self.pop()?;
                self.pop()?;
                self.stack.push(Value::Other);
            }
            // The state of an array ends with its bytes; that of a type of numbers has none.
            b'b' => {
                let state = self.pop()?;
                self.pop()?;
                let content = match state {
                    Value::List(mut items) => items.pop().filter(|last| matches!(last, Value::Bytes(_))),
                    _ => None,
                };
                self.stack.push(content.unwrap_or(Value::Other));
            }
            op => return Err(format!("unknown operation {op:#04x}")),
        }
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.stack.pop().ok_or_else(|| "the stack is empty".into())
    }

    fn push_int(&mut self, value: impl Into<i64>) {
        self.stack.push(Value::Int(value.into()));
    }

    fn push_bytes(&mut self, n: usize, rest: &mut &[u8]) -> Result<(), String> {
        let (bytes, behind) = rest.split_at_checked(n).ok_or("it is cut short")?;
        *rest = behind;
        self.stack.push(Value::Bytes(bytes.to_vec()));
        Ok(())
    }

    fn remember(&mut self, at: u32) -> Result<(), String> {
        // Large values are never asked for again.
        let value = match self.stack.last().ok_or("the stack is empty")? {
            Value::Bytes(bytes) if bytes.len() < 1 << 10 => Value::Bytes(bytes.clone()),
            Value::Int(value) => Value::Int(*value),
            _ => Value::Other,
        };
        self.memo.insert(at, value);
        Ok(())
    }

    fn recall(&mut self, at: u32) -> Result<(), String> {
        let value = self.memo.get(&at).ok_or("it asks for a value that is not there")?;
        self.stack.push(value.clone());
        Ok(())
    }

    fn up_to_mark(&mut self) -> Result<Vec<Value>, String> {
        let at = self.stack.iter().rposition(|value| *value == Value::Mark).ok_or("there is no mark")?;
        let items = self.stack.split_off(at + 1);
        self.stack.pop();
        Ok(items)
    }

    fn list(&mut self) -> Result<&mut Vec<Value>, String> {
        match self.stack.last_mut() {
            Some(Value::List(items)) => Ok(items),
            _ => Err("there is no list".into()),
        }
    }

    fn dict(&mut self) -> Result<&mut Vec<(Value, Value)>, String> {
        match self.stack.last_mut() {
            Some(Value::Dict(entries)) => Ok(entries),
            _ => Err("there is no dictionary".into()),
        }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (bytes, behind) = rest.split_first_chunk::<N>().ok_or("it is cut short")?;
    *rest = behind;
    Ok(*bytes)
}

fn line(rest: &mut &[u8]) -> Result<(), String> {
    let end = rest.iter().position(|&byte| byte == b'\n').ok_or("it is cut short")?;
    *rest = &rest[end + 1..];
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A batch as Python 2 pickled CIFAR's: labels, then `data` as a NumPy array.
    pub fn batch(labels: &[(&str, &[u8])], pixels: &[u8]) -> Vec<u8> {
        let mut out = b"\x80\x02}q\x01(".to_vec();
        for (name, values) in labels {
            out.extend([b'U', name.len() as u8]);
            out.extend(name.as_bytes());
            out.extend(b"q\x02]q\x03(");
            out.extend(values.iter().flat_map(|&v| [b'K', v]));
            out.push(b'e');
        }
        out.extend(b"U\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02M\x00\x0c\x86");
        out.extend(b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T");
        out.extend((pixels.len() as u32).to_le_bytes());
        out.extend(pixels);
        out.extend(b"tbu.");
        out
    }

    #[test]
    fn a_batch_becomes_records() {
        let bytes = batch(&[("coarse_labels", &[7, 8]), ("fine_labels", &[70, 80])], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(records(&bytes, &["coarse_labels", "fine_labels"]).unwrap(), [7, 70, 1, 2, 3, 8, 80, 4, 5, 6]);
        assert_eq!(records(&bytes, &["labels"]).unwrap_err(), "it has no `labels`");
    }

    #[test]
    fn a_batch_that_is_cut_short_is_an_error_and_no_damage_makes_it_panic() {
        let whole = batch(&[("labels", &[1, 2])], &[3; 4]);
        assert!(records(&whole, &["labels"]).is_ok());
        for n in 0..whole.len() {
            assert!(records(&whole[..n], &["labels"]).is_err(), "cut at {n}");
        }
        for at in 0..whole.len() {
            for flip in [1, 0x20, 0x80, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                let _ = records(&damaged, &["labels"]);
            }
        }
    }
}
