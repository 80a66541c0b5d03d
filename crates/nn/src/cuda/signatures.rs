//! Names and parameters of the kernels, read from their sources. So neither is written down twice, and a launch can be
//! checked against the declaration.

/// A kernel as its source declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signature {
    pub name: String,
    /// The types of its parameters; `*` is any pointer.
    pub parameters: Vec<String>,
}

/// The kernels that a source declares, itself or by macros.
pub(super) fn signatures(source: &str) -> Vec<Signature> {
    expand(source).split("extern \"C\" __global__ void").skip(1).filter_map(declaration).collect()
}

/// Reads `[__launch_bounds__(…)] name(parameters)`.
fn declaration(text: &str) -> Option<Signature> {
    let mut text = text.trim_start();
    if let Some(bounds) = text.strip_prefix("__launch_bounds__") {
        let mut depth = 0;
        let end = bounds.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        })?;
        text = &bounds[end + 1..];
    }
    let (name, rest) = text.split_once('(')?;
    let (parameters, _) = rest.split_once(')')?;
    Some(Signature { name: name.trim().into(), parameters: parameters.split(',').map(type_of).collect() })
}

fn type_of(parameter: &str) -> String {
    if parameter.contains('*') {
        return "*".into();
    }
    let words: Vec<&str> = parameter.split_whitespace().filter(|word| *word != "const").collect();
    words[..words.len().saturating_sub(1)].join(" ")
}

/// A source in which the macros that declare kernels are replaced by what they stand for. Each use has a line of its own.
fn expand(source: &str) -> String {
    let (mut macros, mut text) = (Vec::new(), String::new());
    let list = |text: &str| text.split(',').map(|item| item.trim().to_owned()).collect::<Vec<_>>();
    for line in source.replace("\\\n", " ").lines() {
        let define = line.strip_prefix("#define ").filter(|rest| rest.contains("__global__"));
        if let Some((head, body)) = define.and_then(|rest| rest.split_once(')'))
            && let Some((name, parameters)) = head.split_once('(')
        {
            macros.push((name.to_owned(), list(parameters), body.to_owned()));
            continue;
        }
        let used = line.split_once('(').and_then(|(name, rest)| Some((macros.iter().find(|m| m.0 == name)?, rest)));
        match used {
            Some(((_, parameters, body), rest)) => {
                text += &substitute(body, parameters, &list(rest.trim_end().trim_end_matches(')')));
            }
            None => text += line,
        }
        text.push('\n');
    }
    text
}

/// A macro's body with arguments for its parameters, whose names it joins by `##`.
fn substitute(body: &str, parameters: &[String], arguments: &[String]) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = body.split_inclusive(|c| !is_word(c));
    let replaced = words.flat_map(|piece| {
        let (word, end) = piece.split_at(piece.trim_end_matches(|c| !is_word(c)).len());
        let place = parameters.iter().position(|p| p == word);
        [place.map_or(word, |i| arguments.get(i).map_or("", String::as_str)), end]
    });
    replaced.collect::<String>().replace("##", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(name: &str, parameters: &[&str]) -> Signature {
        Signature { name: name.into(), parameters: parameters.iter().map(|p| (*p).to_owned()).collect() }
    }

    #[test]
    fn declarations_are_read_with_their_bounds_and_macros() {
        let source = "__device__ void helper(int i) {}\n\
            extern \"C\" __global__ void axpy(const int* lanes, int len,\n    float a, Rows x) { f(a); }\n\
            extern \"C\" __global__ void __launch_bounds__(32 * (WM), 2)\n    sums(long long n, double* out) {}\n\
            #define OTHER(x) x\n\
            #define PAIR(kind, vec)  \\\n    extern \"C\" __global__ void name_##kind##_##vec(Rows kind_rows, u32 vec) { g<vec>(); }\n\
            PAIR(SUM, 1)\nPAIR(MAX, 4)\n";
        let expected = [
            signature("axpy", &["*", "int", "float", "Rows"]),
            signature("sums", &["long long", "*"]),
            signature("name_SUM_1", &["Rows", "u32"]),
            signature("name_MAX_4", &["Rows", "u32"]),
        ];
        assert_eq!(signatures(source), expected);
    }
}
