//! Traces of methods and projection rules of the related work, from an independent reference in NumPy
//! (`fixtures/related`). The scene is that of [`crate::traces`].

const NORM: &str = "model={name='layers', layers=[{op='linear', name='fc1', outputs=8}, {op='batch_norm', name='bn1'}, \
                    {op='relu'}, {op='linear', name='fc2'}]}";

/// Rules that no distillation hides.
const PLAIN: &str = "method.fedproj.distill.epochs=0";

/// As [`crate::traces`] has them.
pub const TRACES: &[(&str, &str, &[&str])] = &[
    ("fedbn", "fedbn", &[NORM]),
    ("fedproj_owm", "fedproj", &[PLAIN, "method.fedproj.projection.rule=owm"]),
    ("fedproj_gpm", "fedproj", &[PLAIN, "method.fedproj.projection.rule=gpm"]),
    ("fedproj_sgp", "fedproj", &[PLAIN, "method.fedproj.projection.rule=sgp"]),
    (
        "fedproj_trgp",
        "fedproj",
        &[PLAIN, "method.fedproj.projection.rule=trgp", "method.fedproj.projection.energy=0.7"],
    ),
    ("pfedhn", "pfedhn", &["method.pfedhn={hidden=6, lr=0.1}"]),
    (
        "fedgen",
        "fedgen",
        &[
            "method.fedgen={generated_weight=0.5, distill_weight=0.7, decay=0.9, steps=3, generator={noise=4, hidden=6, batch=5}}",
            "method.fedgen.optimizer.lr=0.01",
        ],
    ),
    (
        "fedgkt",
        "fedgkt",
        &["method.fedgkt={distill_weight=0.7, temperature=2.0, epochs=2, batch=5}", "method.fedgkt.optimizer.lr=0.01"],
    ),
    ("fedkd", "fedkd", &["method.fedkd={levels=10, noise=0.5, batch=4}"]),
    ("fedgems", "fedgems", &["method.fedgems={label_weight=0.4, batch=4}", "method.fedgems.memory={size=8, batch=4}"]),
];
