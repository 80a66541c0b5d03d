//! `fedproj sbom`: what this program was built from, as a software bill of materials.

use crate::say;
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

/// The versions that the build used. They are part of the program, so the list needs neither sources nor a network.
const LOCK: &str = include_str!("../../../Cargo.lock");

#[derive(Deserialize)]
struct Lock {
    package: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    source: Option<String>,
    checksum: Option<String>,
    /// `name`, or `name version` where there are several.
    #[serde(default)]
    dependencies: Vec<String>,
}

impl Package {
    /// A package URL; the checksums of the registry stand in the lock file.
    fn url(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }

    fn component(&self) -> Value {
        let mut component = json!({
            "type": "library",
            "bom-ref": self.url(),
            "name": self.name,
            "version": self.version,
            "purl": self.url(),
        });
        if let Some(checksum) = &self.checksum {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        if self.source.is_none() {
            component["licenses"] = json!([{ "expression": env!("CARGO_PKG_LICENSE") }]);
        }
        component
    }
}

/// `sbom` takes no arguments.
#[derive(clap::Args)]
pub struct Sbom {}

impl Sbom {
    /// Prints the list in the format CycloneDX 1.5.
    #[allow(clippy::unused_self, reason = "a command like the others")]
    pub fn run(self) -> Result<()> {
        say!("{}", serde_json::to_string_pretty(&bill(LOCK)?)?);
        Ok(())
    }
}

fn bill(lock: &str) -> Result<Value> {
    let Lock { package: packages } = toml::from_str(lock).context("the program's own Cargo.lock")?;
    let program = env!("CARGO_PKG_NAME");
    let find = |wanted: &str| {
        let (name, version) = wanted.split_once(' ').map_or((wanted, None), |(name, version)| (name, Some(version)));
        let found = packages.iter().find(|p| p.name == name && version.is_none_or(|version| p.version == version));
        found.with_context(|| format!("Cargo.lock has no package `{wanted}`"))
    };
    let mut main = find(program)?.component();
    main["type"] = "application".into();
    let components: Vec<Value> = packages.iter().filter(|p| p.name != program).map(Package::component).collect();
    let depends = |package: &Package| {
        let on = package.dependencies.iter().map(|name| Ok(find(name)?.url()));
        Ok(json!({ "ref": package.url(), "dependsOn": on.collect::<Result<Vec<_>>>()? }))
    };
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": main,
            "properties": [{
                "name": "fedproj:scope",
                "value": "Every package of Cargo.lock: also those of other systems and of tests.",
            }],
        },
        "components": components,
        "dependencies": packages.iter().map(depends).collect::<Result<Vec<_>>>()?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_bill_lists_every_package_of_the_lock_once_and_its_references_lead_somewhere() {
        let bill = bill(LOCK).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let list = |value: &Value| value.as_array().unwrap().clone();
        let mut refs: BTreeSet<String> = list(&bill["components"]).iter().map(|c| text(&c["bom-ref"])).collect();
        assert!(refs.insert(text(&bill["metadata"]["component"]["bom-ref"])));
        assert_eq!(refs.len(), LOCK.matches("[[package]]").count());
        let rustls = list(&bill["components"]).into_iter().find(|c| c["name"] == "rustls").unwrap();
        assert_eq!(rustls["hashes"][0]["content"].as_str().unwrap().len(), 64);
        for dependency in list(&bill["dependencies"]) {
            let on = list(&dependency["dependsOn"]);
            assert!(on.iter().chain([&dependency["ref"]]).all(|r| refs.contains(&text(r))), "{dependency}");
        }
        let ours = list(&bill["dependencies"]).into_iter().find(|d| text(&d["ref"]).contains("/fedproj-net@")).unwrap();
        assert!(ours["dependsOn"].as_array().unwrap().contains(&rustls["bom-ref"]));
    }
}
