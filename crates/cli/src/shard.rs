//! `--shard I/N`: one of several processes that share the runs of a sweep, on any cluster with a shared file system.

use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::Error;
use fedproj_study::Job;
use std::fmt;
use std::str::FromStr;

/// Arguments by which processes share the runs of a sweep.
#[derive(Args)]
pub struct ShardArgs {
    /// Make only every N-th run of the sweep, from the I-th on; --shard none makes all [default: a Slurm array's]
    #[arg(long, value_name = "I/N")]
    shard: Option<Choice>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Whole,
    One(Shard),
}

/// One of N equal parts of a sweep, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    at: usize,
    of: usize,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::Whole);
        }
        let numbers = text.split_once('/').and_then(|(at, of)| Some((at.parse().ok()?, of.parse().ok()?)));
        let (at, of) = numbers.ok_or("must be two numbers, such as 2/8")?;
        if of == 0 || !(1..=of).contains(&at) {
            return Err(format!("the first number must be from 1 to {of}"));
        }
        Ok(Self::One(Shard { at, of }))
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shard {}/{}", self.at, self.of)
    }
}

impl ShardArgs {
    /// The part of this process, if there is more than one.
    pub fn shard(&self) -> Result<Option<Shard>> {
        match self.shard {
            Some(Choice::Whole) => Ok(None),
            Some(Choice::One(shard)) => Ok(Some(shard)),
            None => of_slurm(&|name| std::env::var(name).ok()),
        }
    }
}

impl Shard {
    /// The jobs of this part.
    pub fn of(self, jobs: Vec<Job>) -> Vec<Job> {
        let mine = jobs.into_iter().enumerate().filter(|(at, _)| at % self.of == self.at - 1);
        mine.map(|(_, job)| job).collect()
    }
}

/// The part of a task of a Slurm array: `sbatch --array=0-7`, `--array=1-8` or `--array=1-15:2`. An array with gaps has no
/// parts that this can know.
fn of_slurm(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Shard>> {
    let Some(id) = variable("SLURM_ARRAY_TASK_ID") else { return Ok(None) };
    let number = |name: &str| variable(name).and_then(|text| text.parse::<usize>().ok());
    let (first, last, n) =
        (number("SLURM_ARRAY_TASK_MIN"), number("SLURM_ARRAY_TASK_MAX"), number("SLURM_ARRAY_TASK_COUNT"));
    let step = number("SLURM_ARRAY_TASK_STEP").unwrap_or(1).max(1);
    if let (Ok(id), Some(first), Some(last), Some(n)) = (id.parse::<usize>(), first, last, n)
        && (first..=last).contains(&id)
        && (last - first) / step + 1 == n
        && (id - first).is_multiple_of(step)
    {
        return Ok(Some(Shard { at: (id - first) / step + 1, of: n }));
    }
    bail!(Error::config(format!(
        "SLURM_ARRAY_TASK_ID = {id}: this array has gaps, so its tasks have no numbers from 1 on\n\
         hint: sbatch --array=1-8, or --shard I/N, or --shard none to make all runs here"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_core::Config;

    fn slurm(id: &str, first: &str, last: &str, n: &str, step: &str) -> Result<Option<Shard>> {
        let names = ["ID", "MIN", "MAX", "COUNT", "STEP"].map(|name| format!("SLURM_ARRAY_TASK_{name}"));
        let values = [id, first, last, n, step];
        let of = |name: &str| {
            let at = names.iter().position(|known| known == name)?;
            Some(values[at].to_owned()).filter(|value| !value.is_empty())
        };
        of_slurm(&of)
    }

    #[test]
    fn slurm_arrays_become_shards() {
        assert_eq!(slurm("", "", "", "", "").unwrap(), None);
        assert_eq!(slurm("0", "0", "7", "8", "1").unwrap(), Some(Shard { at: 1, of: 8 }));
        assert_eq!(slurm("8", "1", "8", "8", "").unwrap(), Some(Shard { at: 8, of: 8 }));
        assert_eq!(slurm("5", "1", "7", "4", "2").unwrap(), Some(Shard { at: 3, of: 4 }));
        for (id, first, last, n) in [("7", "1", "9", "3"), ("x", "1", "2", "2"), ("1", "", "", "")] {
            assert!(slurm(id, first, last, n, "1").unwrap_err().to_string().contains("--shard"));
        }
    }

    #[test]
    fn every_run_belongs_to_one_shard() {
        let jobs = || -> Vec<Job> {
            (0..7).map(|i| Job { id: i.to_string(), dir: String::new().into(), config: Config::default() }).collect()
        };
        let mut all: Vec<String> = (1..=3).flat_map(|at| Shard { at, of: 3 }.of(jobs())).map(|job| job.id).collect();
        all.sort();
        assert_eq!(all, ["0", "1", "2", "3", "4", "5", "6"]);
        assert!(Shard { at: 9, of: 9 }.of(jobs()).is_empty());
        for wrong in ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong}");
        }
        assert_eq!("2/3".parse(), Ok(Choice::One(Shard { at: 2, of: 3 })));
    }
}
