//! Traces of methods and projection rules of the related work, from an independent reference in NumPy
//! (`fixtures/related`). The scene is that of [`crate::traces`].

const NORM: &str = "model={name='layers', layers=[{op='linear', name='fc1', outputs=8}, {op='batch_norm', name='bn1'}, \
                    {op='relu'}, {op='linear', name='fc2'}]}";

/// As [`crate::traces`] has them.
pub const TRACES: &[(&str, &str, &[&str])] = &[("fedbn", "fedbn", &[NORM])];
