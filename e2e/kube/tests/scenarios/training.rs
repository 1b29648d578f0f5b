//! The real example trains across pods of two nodes, to the losses that it has on this machine's processes.

use super::LONGEST;
use super::life::balanced;
use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::Local;
use aviflow_testcluster::images;
use aviflow_testcluster::oci::Image;
use aviflow_testcluster::until;
use std::fs;
use std::path::{Path, PathBuf};

/// What the example is started with: one layer, and few steps.
const ARGUMENTS: [&str; 8] = ["--layers", "1", "--batch", "4", "--steps", "12", "--checkpoint-every", "6"];

/// The example's folder, copied, with its corpus beside it, and one job for either body.
fn example(folder: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-gpt");
    let copy = folder.join("tiny-gpt");
    fs::create_dir_all(&copy)?;
    let mut corpus = Vec::new();
    let mut files: Vec<_> = fs::read_dir(&source)?.collect::<std::io::Result<_>>()?;
    files.sort_by_key(fs::DirEntry::file_name);
    for entry in files.iter().filter(|entry| entry.path().is_file()) {
        let bytes = fs::read(entry.path())?;
        fs::write(copy.join(entry.file_name()), &bytes)?;
        corpus.extend(bytes);
    }
    fs::create_dir_all(folder.join("corpus"))?;
    fs::write(folder.join("corpus/corpus.bin"), corpus)?;
    Ok(copy)
}

/// An interpreter for the wheels of the environment, which are mounted.
fn image(world: &World) -> Result<String> {
    let layer = images::debian(&["python3", "libpython3-stdlib", "libstdc++6"])?;
    let folder = tempfile::tempdir()?;
    let archive = folder.path().join("jax.tar");
    Image::scratch().layer(&layer).env(&["PATH=/usr/local/bin:/usr/bin:/bin"]).write("jax", &archive)?;
    world.cluster.registry().push(&archive, "jax")
}

pub fn the_example_trains_as_on_this_machine(world: &mut World) -> Result<()> {
    let folder = world.cluster.folder().join("training");
    let code = example(&folder)?;
    let corpus = folder.join("corpus/corpus.bin").display().to_string();
    let set = |field: &str, value: &str| ["--set".to_owned(), format!("{field}={value}")];
    let data = format!("[{{name: corpus, source: {corpus}}}]");

    let local = Local::start(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kube-local"), 2, 1)?;
    let mut words = vec!["run".to_owned(), code.display().to_string()];
    words.extend([set("gpusPerNode", "1"), set("data", &data), set("env", "{NPROC: \"1\"}")].into_iter().flatten());
    words.push("--".to_owned());
    words.extend(ARGUMENTS.map(str::to_owned));
    local.ok(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    let expected = local.losses("tiny-gpt")?;
    let packages = local.packages()?;

    let folder_of = |path: &Path| path.parent().map(|p| p.display().to_string()).context("a folder");
    let shared = world.cluster.folder().join("volumes");
    fs::create_dir_all(&shared)?;
    let pool = serde_json::json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "main"},
        "spec": {"kubernetes": {
            "hostPaths": [folder_of(Path::new(&corpus))?, packages.display().to_string()],
            "storage": {"hostPath": shared.display().to_string()},
        }},
    });
    world.cluster.apply(&pool.to_string())?;
    let image = image(world)?;
    let data = format!(
        "[{{name: corpus, source: {}, mount: /corpus}}, {{name: packages, source: {}, mount: /packages}}]",
        folder_of(Path::new(&corpus))?,
        packages.display()
    );
    // What the pool allows is known a moment later; until then the job is refused, not failed.
    let text = format!(
        "name: tiny-gpt\nimage: {image}\ncode: .\nnodes: 2\ngpusPerNode: 1\nprocesses: perGpu\nseed: 42\n\
         checkpoint: {{path: /checkpoints, every: 1m, keep: 3}}\noutputs: [/out]\ndata: {data}\n\
         env: {{NPROC: \"1\", PYTHONPATH: /packages}}\n\
         run: [bash, -c, 'AVIFLOW_DATA_CORPUS=/corpus/corpus.bin exec python3 train.py {}']\n",
        ARGUMENTS.join(" ")
    );
    fs::write(code.join("kube.yaml"), text)?;
    let said = world.plane.ok(&["run", &code.join("kube.yaml").display().to_string()]);
    let said = said.with_context(|| world.plane.ok(&["show", "tiny-gpt"]).unwrap_or_default())?;
    let id = world.plane.json(&["show", "tiny-gpt"])?["id"].as_u64().context("the job has a number")?;
    let got = fs::read_to_string(shared.join(format!("jobs/{id}/volumes/out/losses.jsonl")))?;
    ensure!(got == expected, "the losses differ: {got}\nand locally: {expected}\n{said}");
    ensure!(got.lines().count() >= 12, "{got}");
    let job = world.cluster.get("/apis/aviflow.dev/v1alpha1/namespaces/default/trainingjobs/tiny-gpt")?;
    ensure!(job["status"]["attempt"] == 1, "{}", job["status"]);
    world.cluster.kubectl_ok(&["delete", "pool", "main"])?;
    until("nothing is left of it", LONGEST, || {
        let pods = world.cluster.get("/api/v1/namespaces/default/pods")?;
        Ok(pods["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    balanced(world)
}
