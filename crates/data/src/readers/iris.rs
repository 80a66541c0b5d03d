//! Fisher's Iris, embedded, features as measured (cm). Source: scikit-learn's copy.

use super::csv::Format;
use crate::dataset::Dataset;
use crate::error::Result;
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::Splits;

pub(crate) const READER: Reader = Reader {
    name: "iris",
    about: "Fisher's Iris: four measurements of three kinds of flower",
    origin: Origin::Embedded,
    options: &["standardise"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    // The first line holds counts and class names: `150,4,setosa,versicolor,virginica`.
    let (header, rows) = include_str!("../../embedded/iris.csv").split_once('\n').unwrap_or_default();
    let class_names = header.split(',').skip(2).map(|name| name.trim().to_owned()).collect();
    let data = Format::plain("embedded iris").parse(rows)?.into_dataset(request.name)?;
    Ok(Splits { train: Dataset { class_names, ..data }, test: None })
}

#[cfg(test)]
mod tests {
    use crate::{SourceConfig, load};

    #[test]
    fn has_fifty_flowers_of_each_kind_in_centimetres() {
        let iris = load(&SourceConfig::named("iris"), None).unwrap().train;
        assert_eq!(iris.class_names(), ["setosa", "versicolor", "virginica"]);
        let labels = iris.labels().unwrap();
        assert!((0..3).all(|c| labels.iter().filter(|&&l| l == c).count() == 50));
        let mut first = [0.0; 4];
        iris.gather(&[0], &mut first);
        assert_eq!(first, [5.1, 3.5, 1.4, 0.2]);
    }
}
