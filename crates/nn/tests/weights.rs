//! Weights in files: what is saved is loaded bit for bit, `PyTorch`'s files are understood, and a file that does not
//! fit is refused with the tensor, what was expected and what was found.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod reference;

use fedproj_nn::models::{self, BertConfig, Norm, Pooling, ResNet, Variant};
use fedproj_nn::{Activation, Graph, Init, Shape, weights};
use proptest::prelude::*;
use reference::bits;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const IMAGE: Shape = Shape { h: 12, w: 10, c: 3 };

fn resnet() -> Graph {
    ResNet { widths: &[4, 6], blocks: 1, stem_pool: true, variant: Variant::default() }.build(IMAGE, 3).unwrap()
}

fn cnn() -> Graph {
    models::cnn(IMAGE, [3, 5], 7, 4, Variant::default()).unwrap()
}

/// A tensor as a file holds it.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

type Tensors = BTreeMap<String, Tensor>;

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |view: TensorView<'_>| Tensor {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    file.tensors().into_iter().map(|(name, view)| (name, tensor(view))).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn save(path: &Path, graph: &Graph, params: &[f32], buffers: &[f32]) {
    std::fs::write(path, weights::to_bytes(path, graph, params, buffers).unwrap()).unwrap();
}

/// A saved resnet in a folder that goes away with the first value.
fn saved() -> (tempfile::TempDir, PathBuf, Graph) {
    let folder = tempfile::tempdir().unwrap();
    let (path, graph) = (folder.path().join("weights.safetensors"), resnet());
    save(&path, &graph, &graph.init_params(1, Init::Xavier), &graph.init_buffers());
    (folder, path, graph)
}

/// Changes the tensors of a good file; loading it must fail with a message that holds the path and all `parts`.
fn check(change: impl Fn(&mut Tensors), parts: &[&str]) {
    let (_folder, path, graph) = saved();
    let mut tensors = read(&path);
    change(&mut tensors);
    write(&path, &tensors);
    check_refused(&path, &graph, parts);
}

fn check_refused(path: &Path, graph: &Graph, parts: &[&str]) {
    let message = weights::load(path, graph).expect_err("a bad file").to_string();
    for part in parts.iter().copied().chain(path.to_str()) {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}

#[test]
fn what_is_saved_is_loaded_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let group = Variant { norm: Norm::Group(2), ..Variant::default() };
    let grouped = ResNet { widths: &[4, 6], blocks: 2, stem_pool: false, variant: group }.build(IMAGE, 3).unwrap();
    for graph in [resnet(), cnn(), grouped] {
        let mut params = graph.init_params(2, Init::Xavier);
        let buffers: Vec<f32> = (0..graph.buffers().len()).map(|i| 0.25 + i as f32).collect();
        // Signed zero, the smallest and the largest numbers are weights like any other.
        params[..4].copy_from_slice(&[-0.0, f32::from_bits(1), f32::MAX, f32::MIN_POSITIVE]);
        save(&path, &graph, &params, &buffers);
        let (loaded, loaded_buffers) = weights::load(&path, &graph).unwrap();
        assert_eq!(bits(&loaded), bits(&params));
        assert_eq!(bits(&loaded_buffers), bits(&buffers));
    }
}

#[test]
fn files_have_the_names_and_shapes_of_pytorch() {
    let (_folder, path, graph) = saved();
    let tensors = read(&path);
    let shape = |name: &str| tensors[name].shape.clone();
    assert_eq!(shape("conv1.weight"), [4, 3, 3, 3]);
    assert_eq!(shape("layers.1.shortcut.0.weight"), [6, 4, 1, 1]);
    assert_eq!(shape("layers.1.bn2.running_var"), [6]);
    assert_eq!(shape("fc.weight"), [3, 6]);
    assert!(tensors.values().all(|t| t.dtype == Dtype::F32));
    assert_eq!(tensors.len(), graph.params().spans().len() + graph.buffers().spans().len());
}

/// The state that `PyTorch` made for the golden tests, under the names of its `state_dict`, loads into the same
/// network.
#[test]
fn weights_of_pytorch_are_loaded() {
    let graphs = [
        ("cnn", models::cnn(Shape::image(32, 32, 3), [8, 16], 24, 10, Variant::default()).unwrap()),
        (
            "resnet8",
            ResNet { widths: &[16, 24, 40], blocks: 1, stem_pool: true, variant: Variant::default() }
                .build(Shape::image(32, 32, 3), 10)
                .unwrap(),
        ),
    ];
    for (name, graph) in graphs {
        let fixture =
            read(Path::new(&format!("{}/../../fixtures/torch/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))));
        let init = |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix("init/")?.to_owned(), tensor.clone()));
        let mut tensors: Tensors = fixture.iter().filter_map(init).collect();
        let counter = Tensor { dtype: Dtype::I64, shape: vec![], bytes: vec![0; 8] };
        tensors.insert("bn1.num_batches_tracked".into(), counter);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("torch.safetensors");
        write(&path, &tensors);
        let (params, buffers) = weights::load(&path, &graph).unwrap();
        for (layout, flat) in [(graph.params(), &params), (graph.buffers(), &buffers)] {
            for span in layout.spans() {
                let bytes: Vec<u8> = span.to_torch(flat).iter().flat_map(|v| v.to_le_bytes()).collect();
                assert_eq!(bytes, tensors[&span.name].bytes, "{}", span.name);
            }
        }
    }
}

#[test]
fn missing_tensors_are_named() {
    check(|t| drop(t.remove("layers.1.conv2.weight")), &["`layers.1.conv2.weight`", "missing", "[6, 6, 3, 3]"]);
    check(|t| drop(t.remove("bn1.running_mean")), &["`bn1.running_mean`", "missing", "[4]"]);
    check(BTreeMap::clear, &["`conv1.weight`", "missing"]);
}

#[test]
fn extra_tensors_are_named() {
    let extra = |t: &mut Tensors, name: &str| {
        let tensor = t["fc.bias"].clone();
        t.insert(name.into(), tensor);
    };
    check(|t| extra(t, "fc2.bias"), &["`fc2.bias`", "no node", "1 such"]);
    check(|t| ["b", "a"].iter().for_each(|name| extra(t, name)), &["`a`", "2 such"]);
}

#[test]
fn tensors_of_another_shape_are_named() {
    let reshape = |name: &'static str, shape: &'static [usize]| {
        move |t: &mut Tensors| {
            let tensor = t.get_mut(name).unwrap();
            tensor.shape = shape.to_vec();
            tensor.bytes.resize(4 * shape.iter().product::<usize>(), 0);
        }
    };
    check(reshape("fc.weight", &[6, 3]), &["`fc.weight`", "[6, 3]", "[3, 6]"]);
    check(reshape("conv1.weight", &[4, 3, 9]), &["`conv1.weight`", "[4, 3, 9]", "[4, 3, 3, 3]"]);
    check(reshape("bn1.weight", &[5]), &["`bn1.weight`", "[5]", "[4]"]);
    check(reshape("bn1.running_var", &[0]), &["`bn1.running_var`", "[0]", "[4]"]);
}

#[test]
fn tensors_of_another_type_are_named() {
    let retype = |dtype: Dtype, size: usize| {
        move |t: &mut Tensors| {
            let tensor = t.get_mut("fc.bias").unwrap();
            tensor.dtype = dtype;
            tensor.bytes.resize(3 * size, 0);
        }
    };
    check(retype(Dtype::F64, 8), &["`fc.bias`", "F64", "F32"]);
    check(retype(Dtype::I16, 2), &["`fc.bias`", "I16", "F32"]);
    check(retype(Dtype::I32, 4), &["`fc.bias`", "I32", "F32"]);
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    for (value, said) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let poison = |name: &'static str, at: usize| {
            move |t: &mut Tensors| {
                t.get_mut(name).unwrap().bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
            }
        };
        check(poison("layers.0.conv1.weight", 17), &["`layers.0.conv1.weight`", said, "element 17", "finite"]);
        check(poison("bn1.running_var", 3), &["`bn1.running_var`", said, "element 3"]);
    }
}

#[test]
fn the_weights_of_another_network_are_refused() {
    let (_folder, path, _) = saved();
    check_refused(&path, &cnn(), &["tensor `"]);
}

#[test]
fn a_file_that_ends_early_is_refused_wherever_it_ends() {
    let (_folder, path, graph) = saved();
    let whole = std::fs::read(&path).unwrap();
    let ends = (0..whole.len()).step_by(97).chain(0..64).chain(whole.len() - 9..whole.len());
    for end in ends {
        std::fs::write(&path, &whole[..end]).unwrap();
        check_refused(&path, &graph, &["safetensors"]);
    }
    let longer = [&whole[..], &[0]].concat();
    std::fs::write(&path, longer).unwrap();
    check_refused(&path, &graph, &["safetensors"]);
}

#[test]
fn a_file_that_is_not_there_and_a_vector_that_is_too_short_are_named() {
    let (path, graph) = (Path::new("no/such.safetensors"), cnn());
    check_refused(path, &graph, &["No such file"]);
    let (params, buffers) = (graph.init_params(1, Init::Torch), graph.init_buffers());
    let message = weights::to_bytes(path, &graph, &params[1..], &buffers).expect_err("too short").to_string();
    assert!(message.contains("parameter vector"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), header in 0u64..500) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("garbage");
        let graph = cnn();
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(weights::load(&path, &graph).is_err());
        // The same behind a length that a header could have.
        std::fs::write(&path, [&header.to_le_bytes()[..], b"{\"", &bytes].concat()).unwrap();
        prop_assert!(weights::load(&path, &graph).is_err());
    }

    #[test]
    fn a_changed_byte_never_panics(at in 0usize..3000, byte: u8) {
        let (_folder, path, graph) = saved();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at] = byte;
        std::fs::write(&path, &bytes).unwrap();
        // It may be a good file still: a weight has another value. It is never one with another number of weights.
        if let Ok((params, buffers)) = weights::load(&path, &graph) {
            prop_assert_eq!((params.len(), buffers.len()), (graph.params().len(), graph.buffers().len()));
            prop_assert!(params.iter().chain(&buffers).all(|v| v.is_finite()));
        }
    }
}

/// A small encoder, and its weights under Hugging Face's names.
fn encoder(pooling: Pooling) -> (Graph, Tensors) {
    let config = BertConfig { vocabulary: 9, positions: 8, pooling, ..BertConfig::sized(1, 4, 2, 6) };
    let graph = models::bert(&config, 8, 2, Variant::default()).unwrap();
    let params = graph.init_params(7, Init::Torch);
    let tensors = graph.params().spans().iter().map(|span| {
        let bytes = span.to_torch(&params).iter().flat_map(|v| v.to_le_bytes()).collect();
        (span.name.clone(), Tensor { dtype: Dtype::F32, shape: span.shape.clone(), bytes })
    });
    (graph.clone(), tensors.collect())
}

/// Loads what `change` made of an encoder's tensors over parameters of 0.5.
fn load_changed(
    pooling: Pooling,
    change: impl FnOnce(&mut Tensors),
) -> (Graph, fedproj_nn::Result<Vec<String>>, Vec<f32>) {
    let (graph, mut tensors) = encoder(pooling);
    change(&mut tensors);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &tensors);
    let mut params = vec![0.5; graph.params().len()];
    let loaded = weights::load_encoder(&path, &graph, &mut params);
    (graph, loaded, params)
}

#[test]
fn an_encoder_is_loaded_under_any_of_its_names_and_its_classifier_stays() {
    let prefixed = |t: &mut Tensors| {
        *t = std::mem::take(t).into_iter().map(|(name, tensor)| (format!("bert.{name}"), tensor)).collect();
    };
    let tensorflow = |t: &mut Tensors| {
        let old = |name: String| {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        };
        *t = std::mem::take(t).into_iter().map(|(name, tensor)| (old(name), tensor)).collect();
    };
    let changes: [&dyn Fn(&mut Tensors); 3] = [&|_| (), &prefixed, &tensorflow];
    for change in changes {
        let (graph, loaded, params) = load_changed(Pooling::Pooler, change);
        let expected = graph.init_params(7, Init::Torch);
        for span in graph.params().spans() {
            let fresh = vec![0.5; span.len()];
            let expected = if span.name.starts_with("classifier") { &fresh } else { &expected[span.range()] };
            assert_eq!(bits(&params[span.range()]), bits(expected), "{}", span.name);
        }
        let ignored = loaded.unwrap();
        assert!(ignored.len() == 2 && ignored.iter().all(|name| name.contains("classifier")), "{ignored:?}");
    }
}

#[test]
fn half_precision_is_widened() {
    // 1.5 and −0.25 in both formats.
    for (dtype, one, other) in [(Dtype::F16, 0x3e00u16, 0xb400u16), (Dtype::BF16, 0x3fc0, 0xbe80)] {
        let (graph, loaded, params) = load_changed(Pooling::Mean, |t| {
            let tensor = t.get_mut("embeddings.LayerNorm.bias").unwrap();
            tensor.dtype = dtype;
            tensor.bytes = [one, other, one, one].iter().flat_map(|v| v.to_le_bytes()).collect();
        });
        loaded.unwrap();
        let span = graph.params().find("embeddings.LayerNorm.bias").unwrap().range();
        assert_eq!(params[span], [1.5, -0.25, 1.5, 1.5]);
    }
}

#[test]
fn an_encoder_that_lacks_something_is_refused_and_what_it_has_too_much_is_told() {
    let (_, loaded, _) = load_changed(Pooling::Pooler, |t| {
        t.remove("pooler.dense.bias");
        t.remove("encoder.layer.0.output.dense.weight");
    });
    let error = loaded.unwrap_err().to_string();
    for said in ["model.safetensors", "2 tensors", "`pooler.dense.bias`", "`encoder.layer.0.output.dense.weight`"] {
        assert!(error.contains(said), "{error}");
    }
    let extra = || Tensor { dtype: Dtype::I64, shape: vec![1], bytes: vec![0; 8] };
    let (_, loaded, _) = load_changed(Pooling::Mean, |t| {
        t.insert("embeddings.position_ids".into(), extra());
        t.insert("cls.predictions.bias".into(), extra());
    });
    let mut ignored = loaded.unwrap();
    ignored.retain(|name| !name.starts_with("classifier"));
    assert_eq!(ignored, ["cls.predictions.bias", "embeddings.position_ids"]);
    let (_, loaded, _) = load_changed(Pooling::Mean, |t| {
        t.get_mut("embeddings.word_embeddings.weight").unwrap().shape = vec![4, 9];
    });
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains("embeddings.word_embeddings.weight") && error.contains("[9, 4]"), "{error}");
}

#[test]
fn a_folder_says_what_encoder_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name| folder.path().join(name);
    let json = r#"{"model_type": "bert", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 6, "vocab_size": 9, "max_position_embeddings": 8}"#;
    std::fs::write(path("config.json"), json).unwrap();
    let problem = |found: fedproj_nn::Result<BertConfig>| found.unwrap_err().to_string();
    // Without weights the folder tells a network's shape, and BERT has a pooler.
    assert_eq!(BertConfig::open(folder.path()).unwrap().pooling, Pooling::Pooler);
    for pooling in [Pooling::Pooler, Pooling::Mean] {
        write(&path("model.safetensors"), &encoder(pooling).1);
        let expected = BertConfig { vocabulary: 9, positions: 8, pooling, ..BertConfig::sized(1, 4, 2, 6) };
        assert_eq!(BertConfig::open(folder.path()).unwrap(), expected);
    }
    let whole = std::fs::read(path("model.safetensors")).unwrap();
    for end in 0..200 {
        std::fs::write(path("model.safetensors"), &whole[..end]).unwrap();
        assert!(problem(BertConfig::open(folder.path())).contains("model.safetensors"));
    }
    std::fs::write(path("config.json"), json.replace("bert", "distilbert")).unwrap();
    let error = problem(BertConfig::open(folder.path()));
    assert!(error.contains("config.json") && error.contains("`distilbert`") && error.contains("`bert`"), "{error}");
}

/// A flattened image lies channels-last here and channels-first in PyTorch, behind a normalisation too.
#[test]
fn a_normalised_flattened_image_is_saved_in_the_order_of_pytorch() {
    let image = Shape::image(2, 3, 4);
    let mut graph = Graph::new(image);
    let flat = graph.flatten("flat", graph.input()).unwrap();
    let norm = graph.batch_norm("norm", flat).unwrap();
    let relu = graph.activation("relu", norm, Activation::Relu).unwrap();
    graph.linear("fc", relu, 2, true).unwrap();
    // Our element (pixel p, channel c) is number 4·p + c; PyTorch's is number 6·c + p.
    let ours: Vec<f32> = (0..24u8).map(f32::from).collect();
    let torch: Vec<f32> = (0..24u8).map(|i| f32::from(4 * (i % 6) + i / 6)).collect();
    for span in graph.params().spans().iter().chain(graph.buffers().spans()) {
        let mut flat = vec![0.0; graph.params().len().max(graph.buffers().len())];
        let n_rows = span.len() / 24;
        let rows = ours.repeat(n_rows.max(1));
        flat[span.range()].copy_from_slice(&rows[..span.len()]);
        let expected = if n_rows > 0 { torch.repeat(n_rows) } else { rows[..span.len()].to_vec() };
        assert_eq!(span.to_torch(&flat), expected, "{}", span.name);
        let mut back = vec![0.0; flat.len()];
        span.write_torch(&expected, &mut back);
        assert_eq!(back, flat, "{}", span.name);
    }
    // Groups of neighbours would be other groups there.
    let message = graph.group_norm("groups", flat, 2).unwrap_err().to_string();
    assert!(message.contains("`groups`") && message.contains("before it is flattened"), "{message}");
    assert!(graph.group_norm("one", flat, 1).is_ok());
}
