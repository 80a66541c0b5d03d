//! PTX as text: functions with their parameters, variables and statements. Names are not resolved here.

use std::collections::HashMap;

/// A module, as the compiler wrote it.
#[derive(Debug, Default)]
pub struct Module {
    /// Functions with a body, by name.
    pub functions: HashMap<String, Function>,
    /// Shared arrays of the whole module.
    pub shared: Vec<Variable>,
    /// Variables in global memory, with their first values.
    pub globals: Vec<(Variable, Vec<u8>)>,
}

/// An array: its name, length in bytes, and alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    /// 0 where the launch decides.
    pub bytes: usize,
    pub align: usize,
}

/// A kernel, or a function that kernels call.
#[derive(Debug, Default)]
pub struct Function {
    pub name: String,
    pub is_kernel: bool,
    pub parameters: Vec<Variable>,
    /// The parameter that it returns.
    pub returns: Option<String>,
    /// Max threads of a block, where it is declared.
    pub threads_max: Option<usize>,
    pub statements: Vec<Statement>,
}

/// One statement of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Its line in the module.
    pub line: u32,
    /// A label, a directive or an instruction, without guard.
    pub text: String,
    /// The predicate that it depends on, and whether it is negated.
    pub guard: Option<(String, bool)>,
}

impl Statement {
    /// The word before the operands.
    pub fn mnemonic(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or("")
    }

    /// The operands; braces and brackets keep theirs together.
    pub fn operands(&self) -> Vec<String> {
        split(self.text.split_once(char::is_whitespace).map_or("", |(_, rest)| rest))
    }

    pub fn label(&self) -> Option<&str> {
        self.text.strip_suffix(':')
    }
}

/// Splits at commas that are in no bracket.
pub fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth, mut part) = (Vec::new(), 0, String::new());
    for c in text.chars() {
        depth += i32::from("{[(".contains(c)) - i32::from("}])".contains(c));
        if c == ',' && depth == 0 {
            parts.push(std::mem::take(&mut part).trim().to_owned());
        } else {
            part.push(c);
        }
    }
    parts.push(part.trim().to_owned());
    parts.retain(|part| !part.is_empty());
    parts
}

/// Text with the number of its line.
struct Cursor<'a> {
    text: &'a str,
    line: u32,
}

impl<'a> Cursor<'a> {
    fn skip(&mut self, len: usize) -> &'a str {
        let (taken, rest) = self.text.split_at(len);
        self.line += taken.matches('\n').count() as u32;
        self.text = rest;
        taken
    }

    fn skip_space(&mut self) {
        let len = self.text.len() - self.text.trim_start().len();
        self.skip(len);
    }

    /// Takes the text up to one of `ends`, and that character.
    fn until(&mut self, ends: &[char]) -> Result<(&'a str, char), String> {
        let at = self.text.find(ends).ok_or_else(|| format!("line {}: the module ends too early", self.line))?;
        let taken = self.skip(at);
        let end = self.skip(1);
        Ok((taken, end.chars().next().unwrap_or(' ')))
    }
}

impl Module {
    /// Reads a module.
    ///
    /// # Errors
    /// If the text is no PTX.
    pub fn parse(source: &str) -> Result<Self, String> {
        let text = without_comments(source);
        let mut at = Cursor { text: &text, line: 1 };
        let mut module = Self::default();
        loop {
            at.skip_space();
            if at.text.is_empty() {
                return Ok(module);
            }
            if [".version", ".target", ".address_size", ".file"].iter().any(|word| at.text.starts_with(word)) {
                at.until(&['\n'])?;
                continue;
            }
            let (head, end) = at.until(&['{', ';'])?;
            if head.contains(".entry") || head.contains(".func") {
                // A declaration without a body comes again with one.
                if end == '{' {
                    let mut function = Function::parse(head)?;
                    function.read_body(&mut at)?;
                    module.functions.insert(function.name.clone(), function);
                }
            } else if head.contains(".shared") {
                module.shared.push(variable(head)?);
            } else if head.contains(".global") || head.contains(".const") {
                let head = if end == '{' { format!("{head}{}", at.until(&[';'])?.0) } else { head.to_owned() };
                module.globals.push(global(&head)?);
            } else {
                return Err(format!("line {}: `{}` is not understood", at.line, head.trim()));
            }
        }
    }
}

/// Comments become spaces, so that lines keep their numbers.
fn without_comments(source: &str) -> String {
    let lines = source.trim_end_matches('\0').lines();
    lines.map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n").collect()
}

fn words_of(text: &str) -> Vec<&str> {
    text.split(|c: char| c.is_whitespace() || ",()".contains(c)).filter(|word| !word.is_empty()).collect()
}

/// Reads `.shared .align 4 .b8 name[2048]` and the like.
pub fn variable(text: &str) -> Result<Variable, String> {
    let words = words_of(text);
    let wrong = || format!("`{}` is no variable", text.trim());
    let place = |word: &str| words.iter().position(|w| *w == word);
    let name = *words.last().ok_or_else(wrong)?;
    let size = words.iter().rev().find_map(|word| type_bytes(word.strip_prefix('.')?)).ok_or_else(wrong)?;
    let align = place(".align").and_then(|i| words.get(i + 1)?.parse().ok()).unwrap_or(size);
    let (name, count) = match name.split_once('[') {
        None => (name, 1),
        Some((name, "]")) => (name, 0),
        Some((name, count)) => (name, count.trim_end_matches(']').parse().map_err(|_| wrong())?),
    };
    Ok(Variable { name: name.into(), bytes: size * count, align })
}

fn global(text: &str) -> Result<(Variable, Vec<u8>), String> {
    let (head, value) = text.split_once('=').map_or((text, ""), |(head, value)| (head, value.trim()));
    let variable = variable(head)?;
    let values: Vec<i64> = value.trim_matches(['{', '}']).split(',').filter_map(|v| v.trim().parse().ok()).collect();
    let size = variable.bytes / values.len().max(1);
    let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(size)).collect();
    bytes.resize(variable.bytes, 0);
    Ok((variable, bytes))
}

/// Bytes of a number of a type, such as `b8` or `f64`.
pub fn type_bytes(name: &str) -> Option<usize> {
    let bits: usize = name.strip_prefix(['b', 's', 'u', 'f'])?.parse().ok()?;
    matches!(bits, 8 | 16 | 32 | 64).then_some(bits / 8)
}

impl Function {
    /// Reads the head: `.visible .entry name(parameters) .maxntid 256, 1, 1`.
    fn parse(head: &str) -> Result<Self, String> {
        let wrong = || format!("`{}` is no function", head.trim());
        let is_kernel = head.contains(".entry");
        let (_, mut rest) = head.split_once(if is_kernel { ".entry" } else { ".func" }).ok_or_else(wrong)?;
        let mut returns = None;
        if let Some(text) = rest.trim_start().strip_prefix('(') {
            let (value, after) = text.split_once(')').ok_or_else(wrong)?;
            returns = Some(variable(value)?.name);
            rest = after;
        }
        let (name, rest) = rest.split_once('(').unwrap_or((rest, ")"));
        let (parameters, directives) = rest.rsplit_once(')').ok_or_else(wrong)?;
        let parameters = split(parameters).iter().map(|p| variable(p)).collect::<Result<_, _>>()?;
        let threads = directives.split_once(".maxntid").map(|(_, after)| {
            let numbers = after.split('.').next().unwrap_or("").split(',');
            numbers.filter_map(|n| n.trim().parse::<usize>().ok()).product()
        });
        let name = name.trim().to_owned();
        Ok(Self { name, is_kernel, parameters, returns, threads_max: threads, statements: Vec::new() })
    }

    /// Reads statements up to the brace that ends the body. Braces of scopes are dropped: names in them are declared
    /// anew.
    fn read_body(&mut self, at: &mut Cursor<'_>) -> Result<(), String> {
        let mut depth = 1;
        loop {
            at.skip_space();
            let line = at.line;
            if let Some(brace) = at.text.chars().next().filter(|c| "{}".contains(*c)) {
                at.skip(1);
                depth += if brace == '{' { 1 } else { -1 };
                if depth == 0 {
                    return Ok(());
                }
                continue;
            }
            let word = at.text.find(|c: char| c.is_whitespace() || ":;{".contains(c)).unwrap_or(0);
            let is_label = at.text[word..].starts_with(':') && !at.text[..word].contains('.');
            let mut text = at.skip(word + usize::from(is_label)).to_owned();
            if !is_label {
                text += at.until(&[';'])?.0;
            }
            let text = text.trim();
            let (guard, text) = match text.strip_prefix('@').and_then(|rest| rest.split_once(char::is_whitespace)) {
                Some((name, rest)) => {
                    let positive = name.strip_prefix('!');
                    (Some((positive.unwrap_or(name).to_owned(), positive.is_some())), rest.trim())
                }
                None => (None, text),
            };
            if !text.is_empty() && !text.starts_with(".pragma") {
                self.statements.push(Statement { line, text: text.to_owned(), guard });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_read_with_its_scopes_labels_and_guards() {
        let source = ".version 8.0\n.target sm_80\n.shared .align 8 .b8 parts[256];\n.global .align 4 .u32 N = -2;\n\
            .visible .entry k(\n .param .u64 k_0,\n .param .align 8 .b8 k_1[24]\n)\n.maxntid 32, 2, 1\n{\n\
            .reg .b32 %r<3>; // two\n$L_1:\n{ .reg .b32 %t; mov.b64 {%t, %r1}, %fd1;\n}\n@!%p1 bra $L_1;\nret;\n}\n";
        let module = Module::parse(source).unwrap();
        assert_eq!(module.shared, [Variable { name: "parts".into(), bytes: 256, align: 8 }]);
        assert_eq!(module.globals[0].1, (-2i32).to_le_bytes());
        let kernel = &module.functions["k"];
        assert!(kernel.is_kernel && kernel.threads_max == Some(64));
        assert_eq!(kernel.parameters.iter().map(|p| (p.bytes, p.align)).collect::<Vec<_>>(), [(8, 8), (24, 8)]);
        let texts: Vec<&str> = kernel.statements.iter().map(|s| s.text.as_str()).collect();
        assert_eq!(texts[1..], ["$L_1:", ".reg .b32 %t", "mov.b64 {%t, %r1}, %fd1", "bra $L_1", "ret"]);
        assert_eq!(kernel.statements[3].operands(), ["{%t, %r1}", "%fd1"]);
        assert_eq!(kernel.statements[4].guard, Some(("%p1".into(), true)));
        assert_eq!(kernel.statements[4].line, 15);
        assert!(Module::parse(".visible .entry k()\n{ ret;").is_err());
    }
}
