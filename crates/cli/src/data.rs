//! `fedproj data`: which data sets are known, which are here, and how to get the others; `get` unpacks what was downloaded.

use crate::preview::Preview;
use crate::{give, say, tell};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use fedproj_core::Error;
use fedproj_data::catalogue::{self, Depth, Entry, Part, State};
use fedproj_data::packages::{self, Installed};
use fedproj_data::{Splits, registry};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `data`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Data {
    #[command(subcommand)]
    command: Option<DataCommand>,
    /// Read this data set, count its classes and hash its contents
    name: Option<String>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long = "data-dir", value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Read every data set that is here: exact counts, hashes, and what is wrong with damaged files
    #[arg(long)]
    hash: bool,
    /// Print JSON: an array, or an object if NAME is given
    #[arg(long)]
    json: bool,
}

/// What `data` does beyond listing.
#[derive(Subcommand)]
enum DataCommand {
    /// Unpack and check a data set that you downloaded; without --from, show where to download it
    Get(Get),
    /// Draw a contact sheet of a data set's first images
    Preview(Preview),
}

/// Arguments of `data get`.
#[derive(Args)]
struct Get {
    /// The data set
    name: String,
    /// A file as the data set's own site ships it, or a folder with such files
    #[arg(long, value_name = "FILE | DIR")]
    from: Option<PathBuf>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data, which is made]
    #[arg(long = "data-dir", value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Get {
    fn run(self) -> Result<()> {
        let name = registry::find(&self.name)?.name;
        let publication = packages::publication(name)?;
        let Some(from) = self.from else {
            say!("{name} is published at {}", publication.site);
            for (at, form) in publication.forms.iter().enumerate() {
                say!("{}", if at == 0 { "download" } else { "or" });
                for package in *form {
                    let md5 = package.md5.map_or_else(|| "no checksum is known".into(), |md5| format!("MD5 {md5}"));
                    say!("  {:<28}{md5}", package.file);
                }
            }
            say!("then: fedproj data get {name} --from FILE");
            return Ok(());
        };
        let dir = data_dir(self.dir)?.unwrap_or_else(|| PathBuf::from("data"));
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make `{}`", dir.display()))?;
        let (folder, installed) = packages::install(name, &from, &dir)?;
        for Installed { file, md5, is_published } in installed {
            let known = if is_published { "as published" } else { "no published checksum is known to compare with" };
            say!("`{}`: MD5 {md5}, {known}", file.display());
        }
        say!("{name} is in `{}`", folder.display());
        Ok(())
    }
}

/// The data directory: the flag, which must name one, else `FEDPROJ_DATA`, else `./data` if it exists.
///
/// # Errors
/// If `flag` names no directory.
pub fn data_dir(flag: Option<PathBuf>) -> Result<Option<PathBuf>> {
    if let Some(dir) = flag.as_deref().filter(|dir| !dir.is_dir()) {
        bail!(Error::config(format!("--data-dir {}: there is no such directory", dir.display())));
    }
    let environment = || std::env::var_os("FEDPROJ_DATA").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    Ok(flag.or_else(environment).or_else(|| Some(PathBuf::from("data")).filter(|dir| dir.is_dir())))
}

impl Data {
    /// Looks and prints.
    pub fn run(self) -> Result<()> {
        match self.command {
            Some(DataCommand::Get(get)) => return get.run(),
            Some(DataCommand::Preview(preview)) => return preview.run(),
            None => (),
        }
        let dir = data_dir(self.dir)?;
        if let Some(dir) = dir.as_deref().filter(|dir| !dir.is_dir()) {
            tell!("warning: $FEDPROJ_DATA names `{}`, which is no directory", dir.display());
        }
        let Some(name) = self.name else {
            let depth = if self.hash { Depth::Contents } else { Depth::Presence };
            let entries = catalogue::list(dir.as_deref(), depth);
            return give(self.json, &entries, || print_list(&entries, dir.as_deref(), self.hash));
        };
        let details = Details::new(registry::find(&name)?.name, dir.as_deref())?;
        give(self.json, &details, || details.print())
    }
}

fn print_list(entries: &[Entry], dir: Option<&Path>, with_hash: bool) {
    let hash_header = if with_hash { "hash (train)  " } else { "" };
    say!("{:<15}{:>9}{:>7}{:>9}{:>12}  {hash_header}where", "name", "train", "test", "classes", "shape");
    for e in entries {
        let (train, test) = (text(n_samples(e.train.as_ref())), text(n_samples(e.test.as_ref())));
        let (shape, classes) = (text(e.shape), text(e.n_classes));
        let hash = e.train.as_ref().and_then(|part| part.hash.as_deref()).map_or("–", |hash| &hash[..12]);
        let hash = if with_hash { format!("{hash:<14}") } else { String::new() };
        say!("{:<15}{train:>9}{test:>7}{classes:>9}{shape:>12}  {hash}{}", e.name, place(e));
    }
    say!("");
    for e in entries {
        say!("{:<15}{}", e.name, e.about);
    }
    let dir = dir.map_or("none; set one with --data-dir or FEDPROJ_DATA".into(), |dir| format!("`{}`", dir.display()));
    say!("\nData directory: {dir}");
    for e in entries {
        if let Some(what) = e.problem.as_deref().or(e.how_to_get) {
            say!("{:<15}{}", e.name, what.replace('\n', "; "));
        }
    }
}

/// A data set with what is inside.
#[derive(Serialize)]
struct Details {
    #[serde(flatten)]
    entry: Entry,
    /// Empty for a data set that is not there.
    classes: Vec<Class>,
}

#[derive(Serialize)]
struct Class {
    name: String,
    n_train: usize,
    n_test: usize,
}

impl Details {
    fn new(name: &str, dir: Option<&Path>) -> Result<Self> {
        let find = || catalogue::list(dir, Depth::Presence).into_iter().find(|e| e.name == name);
        let readable = |e: &Entry| matches!(e.state, State::Embedded | State::Found | State::Archive);
        let is_here = find().is_some_and(|e| readable(&e));
        let content = is_here.then(|| catalogue::read(name, dir)).transpose()?;
        // Once more: reading unpacks an archive.
        let mut entry = find().ok_or_else(|| anyhow::anyhow!("`{name}` is not in the catalogue"))?;
        let Some(Splits { train, test }) = content else { return Ok(Self { entry, classes: Vec::new() }) };
        let n_test = test.as_ref().map(|test| test.counts.clone());
        entry.train = Some(train.part);
        entry.test = test.map(|test| test.part);
        let class = |(at, (name, n_train)): (usize, (String, usize))| {
            let n_test = n_test.as_ref().map_or(0, |test| test[at]);
            Class { name, n_train, n_test }
        };
        Ok(Self { entry, classes: train.classes.into_iter().zip(train.counts).enumerate().map(class).collect() })
    }

    fn print(&self) {
        let e = &self.entry;
        say!("{}\n  what     {}", e.name, e.about);
        say!("  where    {}", place(e));
        if let Some(how) = e.how_to_get {
            say!("  get it   {how}");
        }
        if !e.files.is_empty() {
            say!("  files    {}", e.files.join(", "));
        }
        say!("  options  {}", if e.options.is_empty() { "none".into() } else { e.options.join(", ") });
        say!("  shape    {}", text(e.shape));
        for (name, part) in [("train", &e.train), ("test", &e.test)] {
            if let Some(part) = part {
                let hash = part.hash.as_ref().map_or(String::new(), |hash| format!(", BLAKE3 {hash}"));
                say!("  {name:<7}  {} samples{hash}", part.n_samples);
            }
        }
        say!("  classes  {}", text(e.n_classes));
        for (at, class) in self.classes.iter().enumerate() {
            say!("{at:>6}{:>7} train{:>7} test  {}", class.n_train, class.n_test, class.name);
        }
    }
}

fn place(entry: &Entry) -> String {
    let path = entry.location.as_ref().map_or(String::new(), |path| format!("`{}`", path.display()));
    match entry.state {
        State::Embedded => "in the program".into(),
        State::Found => path,
        State::Archive => format!("{path}, unpacked on first use"),
        State::Missing => "missing".into(),
        State::Damaged => format!("{path}, damaged"),
        State::Drawn => "drawn from a seed: { name = \"procedural\", source = … }".into(),
        State::Format => "a format for files of your own: { name = …, path = … }".into(),
    }
}

fn n_samples(part: Option<&Part>) -> Option<usize> {
    part.map(|part| part.n_samples)
}

fn text(value: Option<impl ToString>) -> String {
    value.map_or("–".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_count_the_classes_of_what_is_there() {
        let digits = Details::new("digits", None).unwrap();
        assert_eq!(digits.classes.len(), 10);
        assert_eq!(digits.classes.iter().map(|c| c.n_train).sum::<usize>(), 1797);
        assert!(digits.entry.train.unwrap().hash.is_some());
        let cifar10 = Details::new("cifar10", None).unwrap();
        assert!(cifar10.classes.is_empty() && cifar10.entry.how_to_get.is_some());
    }
}
