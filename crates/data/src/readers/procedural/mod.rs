//! Images drawn from a seed, so that a public set needs no data: only the seed travels.
//!
//! An image is a function of the seed, its number, its size and its source; it never depends on which thread drew it or on
//! how many others there are. Arithmetic is that of integers, or of `f64` with +, −, ×, ÷ and √ only: those are
//! rounded alike on every machine, but sines and powers are not.

mod crops;
mod fractal;
mod leaves;
mod noise;

use std::path::Path;

use fedproj_rng::{Purpose, Stream};

use crate::cache;
use crate::dataset::{Dataset, Normalisation, Samples, Shape};
use crate::error::{Error, Result};
use crate::parts::Parts;
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::{ProceduralSource, SourceConfig, Splits};
use crops::Pyramid;

pub(crate) const READER: Reader = Reader {
    name: "procedural",
    about: "images drawn from a seed, for a public set without data",
    origin: Origin::Drawn,
    options: &["source", "seed", "samples", "path", "resize"],
    read: Read::Numbers(read),
};

/// Images where `samples` gives no number.
const N_SAMPLES: usize = 10_000;
/// Side and channels of an image that need not fit another set.
const SIZE: [usize; 3] = [32, 32, 3];
/// More values than this are a mistake, not a public set.
const VALUES_MAX: usize = 1 << 32;

fn read(request: &Request<'_>) -> Result<Splits> {
    let [height, width] = request.config.resize.unwrap_or([SIZE[0], SIZE[1]]);
    let shape = Shape::Image { height, width, channels: SIZE[2] };
    Ok(Splits { train: Recipe::new(request, shape)?.draw(None)?, test: None })
}

/// A procedural set of images like those of another set: of its size, its channels and its units.
///
/// Images are kept in `cache`, a folder, and drawn once.
///
/// # Errors
/// If an option is wrong, or the other set does not hold images of bytes.
pub fn procedural_like(
    config: &SourceConfig,
    other: &Dataset,
    data_dir: Option<&Path>,
    cache: Option<&Path>,
) -> Result<Dataset> {
    let (_, request) = crate::registry::request(config, data_dir)?;
    let (Shape::Image { .. }, Samples::U8(_)) = (other.shape(), other.samples()) else {
        return Err(Error::bad_option(
            READER.name,
            format!("draws images of bytes, but the samples of `{}` are none", other.name()),
            "name a data set of the same kind, or use data.public = \"split\"; texts need texts of another domain: drawn \
             words would have no grammar and no meaning to distil",
        ));
    };
    let normalisation = Normalisation { unit: 1.0 / 255.0, ..other.normalisation().clone() };
    Recipe::new(&request, other.shape())?.draw(cache)?.with_normalisation(normalisation)
}

/// What decides the images.
struct Recipe {
    painter: Painter,
    seed: u64,
    n_samples: usize,
    size: [usize; 3],
}

enum Painter {
    Leaves,
    Fractal,
    Noise,
    Crops(Pyramid),
}

impl Recipe {
    fn new(request: &Request<'_>, shape: Shape) -> Result<Self> {
        let (config, wrong) =
            (request.config, |problem: String, hint: &str| Error::bad_option(READER.name, problem, hint));
        let Shape::Image { height, width, channels } = shape else { unreachable!("callers have an image's shape") };
        let n_samples = config.samples.unwrap_or(N_SAMPLES);
        if n_samples == 0 || shape.is_empty() || n_samples.saturating_mul(shape.len()) > VALUES_MAX {
            let problem = format!("cannot draw {n_samples} images of {shape}");
            return Err(wrong(problem, "samples and both sides are at least 1, and all images take at most 4 GB"));
        }
        let source = config.source.ok_or_else(|| {
            wrong("`source` is missing".into(), "source is \"dead-leaves\", \"fractal\", \"noise\" or \"crops\"")
        })?;
        let painter = match (source, &config.path) {
            (ProceduralSource::Crops, Some(_)) if channels != 1 && channels != 3 => {
                return Err(wrong(format!("crops have 1 or 3 channels, not {channels}"), "source = \"dead-leaves\""));
            }
            (ProceduralSource::Crops, Some(_)) => Painter::Crops(Pyramid::read(&request.path()?, channels)?),
            (ProceduralSource::Crops, None) => {
                return Err(wrong("crops need an image".into(), "path = \"photo.jpg\" names a PNG or JPEG file"));
            }
            (_, Some(_)) => return Err(wrong("only crops take a `path`".into(), "source = \"crops\"")),
            (ProceduralSource::DeadLeaves, None) => Painter::Leaves,
            (ProceduralSource::Fractal, None) => Painter::Fractal,
            (ProceduralSource::Noise, None) => Painter::Noise,
        };
        Ok(Self { painter, seed: config.seed.unwrap_or(0), n_samples, size: [height, width, channels] })
    }

    fn draw(&self, folder: Option<&Path>) -> Result<Dataset> {
        let [height, width, channels] = self.size;
        let kept = folder.map(|folder| (folder, self.key()));
        let known = kept.as_ref().and_then(|(folder, key)| cache::read(folder, key));
        let known = known.filter(|bytes| bytes.len() == self.n_samples * height * width * channels);
        let pixels = known.unwrap_or_else(|| {
            let pixels = self.paint_all();
            if let Some((folder, key)) = &kept {
                cache::write(folder, key, &pixels);
            }
            pixels
        });
        let shape = Shape::Image { height, width, channels };
        Dataset::new(READER.name, shape, Samples::U8(pixels), None, Vec::new())
    }

    /// The name of the images in the cache: a hash of all that decides them.
    fn key(&self) -> String {
        let (name, image) = match &self.painter {
            Painter::Leaves => ("dead-leaves", &[][..]),
            Painter::Fractal => ("fractal", &[][..]),
            Painter::Noise => ("noise", &[][..]),
            Painter::Crops(pyramid) => ("crops", pyramid.bytes()),
        };
        let mut parts = Parts::default();
        parts.add(format!("procedural 1, {name}, {}, {}, {:?}", self.seed, self.n_samples, self.size).as_bytes());
        parts.add(image);
        parts.hex()
    }

    /// All images, drawn by one thread per core.
    fn paint_all(&self) -> Vec<u8> {
        let n_values = self.size.iter().product::<usize>();
        let mut pixels = vec![0; self.n_samples * n_values];
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let part = self.n_samples.div_ceil(n_threads);
        std::thread::scope(|scope| {
            for (at, pixels) in pixels.chunks_mut(part * n_values).enumerate() {
                scope.spawn(move || {
                    for (i, image) in pixels.chunks_exact_mut(n_values).enumerate() {
                        self.paint((at * part + i) as u32, image);
                    }
                });
            }
        });
        pixels
    }

    fn paint(&self, index: u32, pixels: &mut [u8]) {
        let mut canvas =
            Canvas { size: self.size, pixels, stream: Stream::new(self.seed, Purpose::Image, [index, 0, 0]) };
        match &self.painter {
            Painter::Leaves => leaves::paint(&mut canvas),
            Painter::Fractal => fractal::paint(&mut canvas),
            Painter::Noise => noise::paint(&mut canvas),
            Painter::Crops(pyramid) => crops::paint(pyramid, &mut canvas),
        }
    }
}

/// One image that is being painted, and its random numbers.
struct Canvas<'a> {
    /// Height, width, channels.
    size: [usize; 3],
    pixels: &'a mut [u8],
    stream: Stream,
}

impl Canvas<'_> {
    /// Uniform in [low, high).
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.stream.uniform()
    }

    /// A direction, uniform on the circle, without an angle: a point of the unit disc, drawn until it is not too near to 0.
    fn direction(&mut self) -> [f64; 2] {
        loop {
            let (x, y) = (self.between(-1.0, 1.0), self.between(-1.0, 1.0));
            let squared = x * x + y * y;
            if (0.01..=1.0).contains(&squared) {
                let norm = squared.sqrt();
                return [x / norm, y / norm];
            }
        }
    }

    /// A colour; of a grey image its first value counts.
    fn colour(&mut self) -> [u8; 3] {
        let [r, g, b, _] = self.stream.next_u32().to_le_bytes();
        [r, g, b]
    }

    fn pixel(&mut self, y: usize, x: usize) -> &mut [u8] {
        let [_, width, channels] = self.size;
        &mut self.pixels[(y * width + x) * channels..][..channels]
    }

    fn fill(&mut self, colour: [u8; 3]) {
        let [height, width, _] = self.size;
        (0..height * width).for_each(|at| set(self.pixel(at / width, at % width), colour));
    }
}

/// Writes a colour into a pixel of any number of channels.
fn set(pixel: &mut [u8], colour: [u8; 3]) {
    pixel.iter_mut().zip(colour.iter().cycle()).for_each(|(value, &c)| *value = c);
}

/// A value of [0, 1] as a byte.
fn byte(value: f64) -> u8 {
    (value * 255.0 + 0.5) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load;

    fn drawn(source: ProceduralSource, seed: u64, n_samples: usize) -> SourceConfig {
        let (source, seed, samples) = (Some(source), Some(seed), Some(n_samples));
        SourceConfig { source, seed, samples, ..SourceConfig::named(READER.name) }
    }

    fn pixels(config: &SourceConfig, dir: Option<&Path>) -> Vec<u8> {
        match load(config, dir).unwrap().train.samples {
            Samples::U8(pixels) => pixels,
            other => panic!("{other:?}"),
        }
    }

    /// A photograph's stand-in: 40×30 pixels, no two of them alike.
    fn picture(dir: &Path) {
        let mut encoder = png::Encoder::new(std::fs::File::create(dir.join("picture.png")).unwrap(), 40, 30);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> =
            (0..1200u32).flat_map(|at| [(at % 40 * 6) as u8, (at / 40 * 8) as u8, at as u8]).collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    }

    #[test]
    fn the_same_seed_draws_the_same_bytes_on_every_machine() {
        let dir = tempfile::tempdir().unwrap();
        picture(dir.path());
        let mut hashes = Vec::new();
        for source in
            [ProceduralSource::DeadLeaves, ProceduralSource::Fractal, ProceduralSource::Noise, ProceduralSource::Crops]
        {
            let path = (source == ProceduralSource::Crops).then(|| "picture.png".into());
            let config = SourceConfig { path, ..drawn(source, 7, 20) };
            let all = pixels(&config, Some(dir.path()));
            hashes.push(blake3::hash(&all).to_hex()[..16].to_owned());
            // An image depends neither on how many there are nor on which thread draws it.
            let three = SourceConfig { samples: Some(3), ..config.clone() };
            assert_eq!(pixels(&three, Some(dir.path())), all[..3 * 3072]);
            let other = SourceConfig { seed: Some(8), ..config };
            assert_ne!(pixels(&other, Some(dir.path())), all, "another seed");
        }
        assert_eq!(hashes, ["76b9720d5e1c7d1b", "ee3cb9d3c27c1f67", "4ce3959a03931210", "9a68fd210830551d"]);
    }

    #[test]
    fn crops_of_one_colour_have_one_colour() {
        let dir = tempfile::tempdir().unwrap();
        let mut encoder = png::Encoder::new(std::fs::File::create(dir.path().join("flat.png")).unwrap(), 70, 50);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().unwrap().write_image_data(&[90, 120, 150].repeat(3500)).unwrap();
        let config = SourceConfig { path: Some("flat.png".into()), ..drawn(ProceduralSource::Crops, 0, 9) };
        for image in pixels(&config, Some(dir.path())).chunks_exact(3072) {
            assert!(image.chunks_exact(3).all(|pixel| pixel == &image[..3]), "{:?}", &image[..9]);
        }
    }

    #[test]
    fn images_have_the_size_and_the_units_of_the_set_that_they_stand_beside() {
        let digits = load(&SourceConfig::named("digits"), None).unwrap().train;
        let config = drawn(ProceduralSource::Noise, 1, 5);
        let images = procedural_like(&config, &digits, None, None).unwrap();
        assert_eq!((images.shape(), images.n_samples()), (digits.shape(), 5));
        let inputs = images.gather_all();
        assert!(inputs.iter().all(|v| (0.0..=1.0).contains(v)) && inputs.iter().any(|v| *v > 0.9));
        let iris = load(&SourceConfig::named("iris"), None).unwrap().train;
        let message = procedural_like(&config, &iris, None, None).unwrap_err().to_string();
        assert!(message.contains("`iris`") && message.contains("\"split\""), "{message}");
    }

    #[test]
    fn images_are_drawn_once_and_a_damaged_file_counts_as_missing() {
        let (dir, digits) = (tempfile::tempdir().unwrap(), load(&SourceConfig::named("digits"), None).unwrap().train);
        let config = drawn(ProceduralSource::Fractal, 1, 5);
        let draw = || procedural_like(&config, &digits, None, Some(dir.path())).unwrap().hash();
        let first = draw();
        let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::read(&file).unwrap();
        // What is read is what was kept, not drawn again: black images under the right checksum show it.
        let black = vec![0; whole.len() - 32];
        std::fs::write(&file, [&black[..], blake3::hash(&black).as_bytes()].concat()).unwrap();
        assert_ne!(draw(), first);
        for damaged in [&whole[..whole.len() - 1], &[]] {
            std::fs::write(&file, damaged).unwrap();
            assert_eq!(draw(), first);
        }
    }

    #[test]
    fn options_that_make_no_sense_are_answered() {
        let message = |config: &SourceConfig| load(config, None).unwrap_err().to_string();
        let leaves = drawn(ProceduralSource::DeadLeaves, 0, 1);
        assert!(message(&SourceConfig::named(READER.name)).contains("dead-leaves"));
        assert!(message(&SourceConfig { samples: Some(0), ..leaves.clone() }).contains("cannot draw 0 images"));
        assert!(message(&SourceConfig { resize: Some([0, 8]), ..leaves.clone() }).contains("at least 1"));
        assert!(message(&SourceConfig { path: Some("a.png".into()), ..leaves }).contains("only crops"));
        assert!(message(&drawn(ProceduralSource::Crops, 0, 1)).contains("photo.jpg"));
    }
}
