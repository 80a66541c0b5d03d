//! From names in a configuration to samples in memory: read, tokenise, hold out, split and draw.

use crate::config::{Config, Draw};
use crate::error::{Error, Result};
use crate::method::Method;
use fedproj_data::{Dataset, SourceConfig, SplitConfig, SplitFor, Splits, Tokenizer, registry};
use fedproj_nn::models::BertConfig;
use fedproj_rng::{Purpose, Stream};
use std::path::{Path, PathBuf};

/// Ids of this module's own draws, beyond those of `fedproj_data::split`.
const PRIVATE_SUBSET: u32 = 100;
const PUBLIC_SUBSET: u32 = 101;

/// A path of the configuration, taken relative to the data directory.
pub(crate) fn in_data_dir(data_dir: Option<&Path>, path: impl AsRef<Path>) -> PathBuf {
    data_dir.map_or_else(|| path.as_ref().to_owned(), |dir| dir.join(path.as_ref()))
}

/// The samples of an experiment.
pub(crate) struct Loaded {
    pub private: Dataset,
    pub test: Dataset,
    /// If needed.
    pub public: Option<Dataset>,
    /// Public samples that are in the test set too.
    pub n_public_in_test: usize,
}

/// Private, test and, if needed, public samples.
pub(crate) fn load(
    config: &Config,
    method: &dyn Method,
    data_dir: Option<&Path>,
    needs_public: bool,
) -> Result<Loaded> {
    let data = &config.data;
    // Missing data come first: their error says how to get them.
    registry::check(&data.private, data_dir)?;
    let tokenizer = tokenizer(config, data_dir)?;
    let read = |source: &SourceConfig| -> Result<Splits> {
        Ok(fedproj_data::load_with(source, data_dir, tokenizer.as_ref())?)
    };
    let Splits { train, test } = read(&data.private)?;
    check_labels(&train)?;
    let (mut private, test) = match test {
        Some(test) => (train, test),
        None => hold_out(&train, config)?,
    };
    let public = match data.public.name.as_str() {
        "none" => None,
        "split" => {
            let how = SplitConfig { fraction: data.public_fraction, stratified: false };
            let (kept, held_out) = fedproj_data::split(&private, SplitFor::Public, how, config.seed)?;
            let public = private.subset(&held_out);
            private = private.subset(&kept);
            Some(public)
        }
        // A split changes the private set, so every method makes it. Another set is read only where it is used.
        _ if !needs_public => None,
        "procedural" => {
            let cache = cache("images");
            Some(fedproj_data::procedural_like(&data.public, &private, data_dir, cache.as_deref())?)
        }
        _ => Some(read(&data.public)?.concatenated()?),
    };
    let stream = |id| Stream::new(config.seed, Purpose::Split, [id, 0, 0]);
    let (n, how) = (data.private_samples, data.private_draw);
    private = draw(private, n, how, &mut stream(PRIVATE_SUBSET), "data.private_samples")?;
    let (mut n, how) = (data.public_samples, data.public_draw);
    if let (true, Some(public)) = (n == 0 && data.private_samples > 0 && data.public.name == "split", &public) {
        // A smaller private set brings a smaller public part: their ratio stays that of `public_fraction`.
        let ratio = data.public_fraction / (1.0 - data.public_fraction);
        n = ((private.n_samples() as f64 * ratio).round() as usize).max(1).min(public.n_samples());
    }
    let public = public.map(|p| draw(p, n, how, &mut stream(PUBLIC_SUBSET), "data.public_samples")).transpose()?;
    // A split shares with the test set only what the private set has twice, which clients train on anyway.
    let other = public.as_ref().filter(|_| data.public.name != "split");
    let n_public_in_test = other.map_or(0, |public| public.n_shared_with(&test));
    if n_public_in_test > 0 && method.needs_public_labels() {
        return Err(Error::config(format!(
            "{n_public_in_test} samples of the public set `{}` are test samples, and method `{}` is set to use public \
             labels: it would train on the answers\nhint: memory.target = \"ensemble\", data.public = \"split\", or another \
             public set",
            data.public.name, config.method.name
        )));
    }
    let public = public.map(|p| if method.needs_public_labels() { p } else { p.without_labels() });
    if data.byte_cast {
        let (private, test) = (private.with_byte_cast(), test.with_byte_cast());
        return Ok(Loaded { private, test, public: public.map(Dataset::with_byte_cast), n_public_in_test });
    }
    Ok(Loaded { private, test, public, n_public_in_test })
}

/// That clients can learn from a data set: it has labels, of several classes.
fn check_labels(data: &Dataset) -> Result<()> {
    if data.labels().is_none() {
        return Err(Error::config(format!(
            "data set `{}` has no labels, which clients need for training\n\
             hint: data.private.label names the column of a table; arrays have their labels in y or y_train",
            data.name()
        )));
    }
    if let [only] = data.class_names() {
        return Err(Error::config(format!(
            "data set `{}` has one class, `{only}`: there is nothing to tell apart\n\
             hint: its labels should be the classes (data.private.label names the column of a table)",
            data.name()
        )));
    }
    Ok(())
}

/// Private and test samples of a set without a test part.
fn hold_out(all: &Dataset, config: &Config) -> Result<(Dataset, Dataset)> {
    let how = SplitConfig { fraction: config.data.test_fraction, stratified: true };
    let (kept, held_out) = fedproj_data::split(all, SplitFor::Test, how, config.seed)?;
    let (private, test) = (all.subset(&kept), all.subset(&held_out));
    if config.data.private.standardise != Some(true) {
        return Ok((private, test));
    }
    // The reader measured all samples; nothing of the test set may enter.
    let normalisation = private.measured_normalisation();
    Ok((private.with_normalisation(normalisation.clone())?, test.with_normalisation(normalisation)?))
}

/// A folder of the user's cache.
fn cache(name: &str) -> Option<PathBuf> {
    fedproj_data::cache::folder().map(|folder| folder.join(name))
}

/// The tokeniser of a run on texts; none where samples are numbers.
fn tokenizer(config: &Config, data_dir: Option<&Path>) -> Result<Option<Tokenizer>> {
    if !registry::find(&config.data.private.name)?.is_text() {
        return Ok(None);
    }
    let text = &config.data.text;
    let vocabulary = if !text.vocabulary.as_os_str().is_empty() {
        in_data_dir(data_dir, &text.vocabulary)
    } else if !config.model.checkpoint.is_empty() {
        in_data_dir(data_dir, &config.model.checkpoint).join("vocab.txt")
    } else {
        return Err(Error::config(
            "texts need a vocabulary\nhint: set model.checkpoint to a BERT folder, or data.text.vocabulary to a vocab.txt",
        ));
    };
    let tokenizer = Tokenizer::open(&vocabulary, text, cache("tokens"))?;
    // The encoders of the catalogue have BERT's own vocabulary.
    let bert = checkpoint(config, data_dir)?.unwrap_or_else(|| BertConfig::sized(1, 1, 1, 1));
    bert.check_vocabulary(&vocabulary, tokenizer.n_words())?;
    Ok(Some(tokenizer))
}

/// The sizes of the configured checkpoint, if there is one.
pub(crate) fn checkpoint(config: &Config, data_dir: Option<&Path>) -> Result<Option<BertConfig>> {
    let name = &config.model.checkpoint;
    if name.is_empty() { Ok(None) } else { Ok(Some(BertConfig::open(&in_data_dir(data_dir, name))?)) }
}

/// `n` samples drawn without replacement (0: all), or the same number per class, `n` at most.
fn draw(data: Dataset, n: usize, how: Draw, stream: &mut Stream, key: &str) -> Result<Dataset> {
    if how == Draw::Balanced {
        return Ok(data.subset(&fedproj_data::balanced(&data, n, stream)?));
    }
    if n == 0 || n == data.n_samples() {
        return Ok(data);
    }
    if n > data.n_samples() {
        let all = data.n_samples();
        return Err(Error::config(format!("{key} = {n}, but `{}` has only {all} samples", data.name())));
    }
    let chosen = stream.choose(data.n_samples() as u32, n as u32);
    Ok(data.subset(&chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_private_samples_bring_fewer_public_ones() {
        let sizes = |pairs: &[&str]| {
            let pairs: Vec<String> = pairs.iter().map(|&pair| pair.to_owned()).collect();
            let config = Config::from_layers(None, &pairs).unwrap();
            let method = config.method.build().unwrap();
            let Loaded { private, public, .. } = load(&config, &*method, None, true).unwrap();
            (private.n_samples(), public.map_or(0, |public| public.n_samples()))
        };
        assert_eq!(sizes(&["data.private_samples=200"]), (200, 200));
        assert_eq!(sizes(&["data.private_samples=200", "data.public_fraction=0.2"]), (200, 50));
        assert_eq!(sizes(&["data.private_samples=200", "data.public_samples=30"]), (200, 30));
    }
}
