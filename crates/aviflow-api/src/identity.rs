//! One hash over everything that decides what a job runs.
//!
//! It is taken twice: of what was submitted, and in each attempt of what lies where
//! the ranks start. The two are the same if what was submitted is what runs.

use crate::environment::hex;
use crate::spec::{JobSpec, Provenance};
use aviflow_core::model::JobKey;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The fact by which an attempt reports its hash.
pub const HASH_FACT: &str = "aviflow.hash";

/// The fact by which an attempt reports the SHA-256 of the packages that its layer had.
pub const LAYER_FACT: &str = "aviflow.layer";

/// SHA-256, hexadecimal, over the canonical JSON (sorted keys, no blanks) of the
/// document (which has the seed), the hash of its code, of its environment and
/// of its data, what its image was resolved to, and the lock of its own packages. Where and when it was submitted, and as a repetition of what,
/// does not enter.
#[must_use]
pub fn job_hash(spec: &JobSpec, provenance: &Provenance) -> String {
    let mut whole = json!({
        "spec": spec,
        "code": provenance.code.as_ref().map(|c| &c.sha256),
        "environment": provenance.environment.as_ref().map(|e| &e.hash),
        "data": provenance.data,
    });
    // Only where there is one: the hashes of jobs without stay what they were.
    if let Some(image) = &provenance.image {
        whole["image"] = json!({"pinned": image.pinned, "env": image.env, "prefix": image.prefix});
    }
    // The lock and the platform: image and namespace do not make other packages of it.
    if let Some(layer) = &provenance.layer {
        whole["layer"] = json!({"lock": layer.lock, "platform": layer.platform});
    }
    let mut text = String::new();
    canonical(&whole, &mut text);
    hex(&Sha256::digest(text))
}

/// The variables by which a tracking service knows all attempts of a job as one run. What the job itself says of such a
/// service wins; `submitted` is in milliseconds.
///
/// The id has 20 characters of `[0-9a-f]`, and is no other job's, also not of another store: MLflow hands out ids of its
/// own and takes none, so it has no variable here.
#[must_use]
pub fn tracking(spec: &JobSpec, key: &JobKey, id: u64, submitted: i64) -> Vec<(&'static str, String)> {
    // Seconds: a job that is taken over from its object has no finer time.
    let whole = format!("{}/{} {id} {}", key.namespace, key.name, submitted.div_euclid(1000));
    let mut run = hex(&Sha256::digest(whole));
    run.truncate(20);
    let own = |name: &&str| spec.env.contains_key(*name) || spec.secrets.contains_key(*name);
    let mut variables = vec![("AVIFLOW_RUN_ID", run.clone())];
    if !["WANDB_RUN_ID", "WANDB_RESUME"].iter().any(own) {
        variables.extend([("WANDB_RUN_ID", run), ("WANDB_RESUME", "allow".to_owned())]);
    }
    variables
}

/// Keys are sorted here, since whether a map of JSON is sorted is a feature that any crate may switch.
fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(key, _)| *key);
            text.push('{');
            for (i, (key, value)) in fields.into_iter().enumerate() {
                if i > 0 {
                    text.push(',');
                }
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                canonical(value, text);
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (i, value) in items.iter().enumerate() {
                if i > 0 {
                    text.push(',');
                }
                canonical(value, text);
            }
            text.push(']');
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{CodeSnapshot, Layer, ResolvedImage};

    #[test]
    fn a_run_is_one_job_and_a_job_one_run() {
        let key = |name: &str| JobKey { namespace: "nlp".into(), name: name.into() };
        let value = |variables: Vec<(&str, String)>, name: &str| {
            variables.into_iter().find(|(n, _)| *n == name).map(|(_, value)| value)
        };
        let all = tracking(&spec("a"), &key("a"), 7, 1_700_000_000_123);
        let run = value(all.clone(), "WANDB_RUN_ID").expect("an id");
        assert!(run.len() <= 64 && run.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase()), "{run}");
        assert_eq!(value(all.clone(), "AVIFLOW_RUN_ID").as_ref(), Some(&run));
        assert_eq!(value(all.clone(), "WANDB_RESUME").as_deref(), Some("allow"));
        assert_eq!(tracking(&spec("a"), &key("a"), 7, 1_700_000_000_999), all, "as its object has it");
        for other in [
            tracking(&spec("a"), &key("b"), 7, 1_700_000_000_123),
            tracking(&spec("a"), &key("a"), 8, 1_700_000_000_123),
            tracking(&spec("a"), &key("a"), 7, 1_700_000_009_123),
        ] {
            assert_ne!(value(other, "WANDB_RUN_ID").as_ref(), Some(&run));
        }
        let mut own = spec("a");
        own.secrets.insert("WANDB_RUN_ID".into(), "tracking/run".into());
        let left = tracking(&own, &key("a"), 7, 1_700_000_000_123);
        assert_eq!(left, [("AVIFLOW_RUN_ID", run)]);
    }

    fn spec(name: &str) -> JobSpec {
        let text = format!("name: {name}\nnodes: 1\ngpusPerNode: 2\nrun: python train.py\n");
        crate::file::parse_job("job.yaml", text.as_bytes(), &crate::file::Defaults::default()).expect("a job").spec
    }

    #[test]
    fn the_hash_is_of_what_runs() {
        let (base, none) = (spec("train"), Provenance::default());
        let hash = job_hash(&base, &none);
        // Fixed: recorded runs are compared by it.
        insta::assert_snapshot!(hash);
        let noted =
            Provenance { rerun_of: Some("default/train".into()), file: Some("job.yaml".into()), ..none.clone() };
        assert_eq!(job_hash(&base, &noted), hash);
        let code = CodeSnapshot { sha256: "ab".into(), bytes: 1, files: 1, commit: None, dirty: false };
        let coded = Provenance { code: Some(code), ..none.clone() };
        let mut seeded = base.clone();
        seeded.seed = Some(7);
        assert_ne!(job_hash(&base, &coded), hash);
        let image = |tag: &str, pinned: &str| Provenance {
            image: Some(ResolvedImage { reference: tag.into(), pinned: pinned.into(), ..ResolvedImage::default() }),
            ..none.clone()
        };
        assert_ne!(job_hash(&base, &image("a:1", "a@1")), job_hash(&base, &image("a:1", "a@2")), "its tag moved");
        assert_eq!(job_hash(&base, &image("a:1", "a@1")), job_hash(&base, &image("a:2", "a@1")), "the same content");
        assert_ne!(job_hash(&seeded, &none), hash);
        let layered = |namespace: &str, lock: &str| Provenance {
            layer: Some(Layer::new(namespace, &ResolvedImage::default(), lock, "linux/amd64")),
            ..none.clone()
        };
        assert_ne!(job_hash(&base, &layered("nlp", "1")), hash);
        assert_ne!(job_hash(&base, &layered("nlp", "1")), job_hash(&base, &layered("nlp", "2")), "another lock");
        assert_eq!(
            job_hash(&base, &layered("nlp", "1")),
            job_hash(&base, &layered("vision", "1")),
            "the same packages"
        );
    }
}
