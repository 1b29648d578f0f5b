//! A canonical document is a file too: written as one and read again it is the same.

use aviflow_api::check::is_reserved;
use aviflow_api::duration::Duration;
use aviflow_api::file::{Defaults, parse_job};
use aviflow_api::schema;
use aviflow_api::spec::*;
use aviflow_core::time::Span;
use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;

fn name() -> impl Strategy<Value = String> {
    "[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?"
}

fn duration() -> impl Strategy<Value = Duration> {
    (1..300_000_000_000_i64).prop_map(|ms| Duration(Span(ms)))
}

fn variable() -> impl Strategy<Value = String> {
    "[A-Z_][A-Z0-9_]{0,10}".prop_filter("the platform's", |v| !is_reserved(v))
}

fn distinct(list: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    list.into_iter().filter(|item| seen.insert(item.clone())).collect()
}

prop_compose! {
    fn place()(
        environment in of("[a-z]{1,8}(@[1-9])?"),
        code in of(prop_oneof![
            "[a-z./]{1,8}".prop_map(Code::Folder),
            ("[a-z:/]{1,12}", "[a-z0-9]{1,8}").prop_map(|(git, reference)| Code::Git { git, reference }),
        ]),
        requirements in of("[a-z]{1,8}\\.lock"),
        seed in of(0..1_u64 << 63),
        run in ("\\PC{0,5}[a-z]", vec("\\PC{0,20}", 0..5)),
        env in btree_map(variable(), "\\PC{0,20}", 0..4),
        secrets in btree_map("S_[A-Z]{1,5}", "[a-z]{1,8}/[a-zA-Z._-]{1,8}", 0..3),
    ) -> (Option<String>, Option<Code>, Option<String>, Option<u64>, Vec<String>, Vec<(String, String)>, Vec<(String, String)>) {
        let requirements = environment.as_ref().and(requirements);
        let run = std::iter::once(run.0).chain(run.1).collect();
        let env = env.into_iter().filter(|(k, _)| !secrets.contains_key(k)).collect();
        (environment, code, requirements, seed, run, env, secrets.into_iter().collect())
    }
}

prop_compose! {
    fn rest()(
        min in 1..50_u32, more in 0..50_u32, gpus in 1..=64_u32,
        types in vec("[A-Z0-9]{1,6}", 0..4), per_gpu in any::<bool>(), preemptible in any::<bool>(),
        failures in 0..=1000_u32, limit in of(duration()), keep in of(1..100_u32), every in of(duration()),
        cpu in of(0.1..256.0_f64), shm in of("[1-9][0-9]{0,2}Mi"), memory in of("[1-9][0-9]{0,2}Gi"),
        level in of("[a-z]{1,6}"), wait in of(duration()), read_only in any::<bool>(),
        after in vec("x-[a-z]{1,8}", 0..3), outputs in 0..3_usize, mounts in 0..3_usize,
    ) -> JobSpec {
        let mut spec = parse_job("base", b"name: a\nrun: x\n", &Defaults::default()).unwrap().spec;
        spec.nodes = Nodes { min, max: min + more };
        spec.gpus_per_node = gpus;
        spec.gpu_type = distinct(types.clone());
        spec.processes = if per_gpu { Processes::PerGpu } else { Processes::PerNode };
        spec.preemptible = preemptible;
        spec.retry = Retry { failures };
        spec.time_limit = limit;
        spec.checkpoint = keep.map(|keep| CheckpointPolicy { path: "/checkpoints".into(), every, keep: Some(keep) });
        spec.resources = Some(Resources { cpu_per_gpu: cpu, memory_per_gpu: memory.clone(), shm: shm.clone() });
        spec.topology = level.clone().map(|l| Topology { require: None, prefer: Some(l), max_wait: wait });
        spec.after = distinct(after.clone()).into_iter().map(|job| After { job, on: Ending::Ended }).collect();
        spec.outputs = (0..outputs).map(|i| format!("/out{i}")).collect();
        spec.data = (0..mounts)
            .map(|i| Data { name: format!("d{i}"), source: format!("s3://b/{i}"), mount: Some(format!("/data{i}")), read_only })
            .collect();
        spec.notify = vec![Notify { webhook: "https://h/x".into(), on: vec![NotifyOn::Failed], format: None }];
        spec
    }
}

fn spec() -> impl Strategy<Value = JobSpec> {
    (name(), name(), place(), rest()).prop_map(|(name, queue, place, rest)| {
        let (environment, code, requirements, seed, run, env, secrets) = place;
        JobSpec {
            name,
            queue,
            environment,
            code,
            requirements,
            seed,
            run,
            env: env.into_iter().collect(),
            secrets: secrets.into_iter().collect(),
            ..rest
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_spec_is_read_back_from_its_file(spec in spec()) {
        let text = serde_json::to_string(&spec).unwrap();
        let parsed = parse_job("job.json", text.as_bytes(), &Defaults::default());
        let parsed = parsed.map_err(|e| TestCaseError::fail(format!("{text}\n{e:#?}")))?;
        prop_assert_eq!(parsed.spec, spec.clone());
        // The schema takes what the reader takes.
        prop_assert!(jsonschema::is_valid(&schema::job(), &serde_json::to_value(&spec).unwrap()));
    }

    #[test]
    fn no_text_breaks_the_reader(text in "(name|run|env|nodes|[a-zA-Z]{1,5}|[-:,\\[\\]{}&*!|>'\"%@`#?$ \n\t0-9]|\\PC){0,60}") {
        let _ = crate::said(text.as_bytes());
    }

    #[test]
    fn no_bytes_break_the_reader(bytes in vec(any::<u8>(), 0..80)) {
        let _ = crate::said(&bytes);
    }

    #[test]
    fn a_mask_keeps_the_length(text in "\\PC{0,40}(hf_[a-z]{25}|-----BEGIN PRIVATE KEY-----\\PC{0,9}|://a:\\PC{1,9}@)\\PC{0,20}") {
        prop_assert_eq!(aviflow_api::secrets::mask(&text).len(), text.len());
    }
}
