//! Calls: the body of the called function replaces the call, under names of its own.

use super::parse::{Function, Module, Statement};

/// The statements of a kernel without calls.
///
/// # Errors
/// If a function without body is called, or one that calls others.
pub fn inline_calls(module: &Module, kernel: &Function) -> Result<Vec<Statement>, String> {
    let mut all = Vec::new();
    for (number, statement) in kernel.statements.iter().enumerate() {
        if !statement.mnemonic().starts_with("call") {
            all.push(statement.clone());
            continue;
        }
        let operands = statement.operands();
        let wrong = || format!("kernel {}, line {}: this call is not understood", kernel.name, statement.line);
        let [result, name, arguments] = &operands[..] else { return Err(wrong()) };
        let function = module.functions.get(name).ok_or_else(wrong)?;
        let inner = |text: &str| super::parse::split(text.trim_matches(['(', ')']));
        let returned = function.returns.iter().map(String::as_str);
        let formal = function.parameters.iter().map(|p| p.name.as_str()).chain(returned);
        let renamed: Vec<_> = formal.zip(inner(arguments).into_iter().chain(inner(result))).collect();
        let call = number.to_string();
        let end = format!("$call_{call}_end");
        for s in &function.statements {
            if s.mnemonic().starts_with("call") {
                return Err(wrong());
            }
            let text = if s.text == "ret" { format!("bra {end}") } else { rename(&s.text, &renamed, &call) };
            let guard = s.guard.as_ref().map(|(name, negated)| (rename(name, &renamed, &call), *negated));
            all.push(Statement { line: s.line, text, guard });
        }
        all.push(Statement { line: statement.line, text: end + ":", guard: None });
    }
    Ok(all)
}

/// Gives registers and labels names that belong to a call, and parameters the names of its arguments.
fn rename(text: &str, renamed: &[(&str, String)], call: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_$%.".contains(c);
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = if len == 0 { rest.split_at(1) } else { rest.split_at(len) };
        match renamed.iter().find(|(name, _)| *name == word) {
            Some((_, argument)) => out += argument,
            None if word.starts_with('$') || word.starts_with('%') && !word.contains('.') => {
                out += &[&word[..1], call, "_", &word[1..]].concat();
            }
            None => out += word,
        }
        rest = after;
    }
    out
}
