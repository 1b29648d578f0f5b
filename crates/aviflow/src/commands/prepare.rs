//! `worker-prepare`: what runs in a pod before the job's own container.
//!
//! It fetches and unpacks the code and the layer with packages of the job's own, copies the agent and the hooks, and
//! completes the worker's spec with what is known only in the pod. What it says last is the reason that people read; with [`LASTING`] it says that another
//! try will not help.

use super::depot::{Depot, Trouble, told, variable};
use crate::serve::write_hooks;
use aviflow_agent::protocol::{WorkerSpec, files};
use aviflow_api::identity::{HASH_FACT, LAYER_FACT, job_hash};
use aviflow_kube::layer::FOLDER;
use aviflow_kube::pod::{DOCUMENT, Document, SPEC};
use aviflow_local::{archive, code};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Prepares a worker below `home`.
pub fn prepare(home: &Path) -> ExitCode {
    told(lay_out(home))
}

/// Does nothing until it is told to end: as process 1 it would not end by itself.
pub fn hold() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let wait = |runtime: tokio::runtime::Runtime| {
        runtime
            .block_on(async { signal(SignalKind::terminate())?.recv().await.ok_or(std::io::ErrorKind::Other.into()) })
    };
    match runtime.and_then(wait) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn lay_out(home: &Path) -> Result<(), Trouble> {
    let disk = |what: &str| {
        let what = what.to_owned();
        move |e: std::io::Error| Trouble::Passing(format!("{what} cannot be written in the pod: {e}"))
    };
    let parse = |what: &str, e: serde_json::Error| Trouble::Lasting(format!("{what} cannot be read: {e}"));
    let mut spec: WorkerSpec = serde_json::from_str(&variable(SPEC)?).map_err(|e| parse("the worker's spec", e))?;
    let document: Document = serde_json::from_str(&variable(DOCUMENT)?).map_err(|e| parse("the job's document", e))?;
    spec.host = variable("AVIFLOW_POD_IP")?;
    // Not secret here: what proves who the worker is comes from kubelet. It marks the worker's processes.
    spec.token = variable("AVIFLOW_POD_UID")?;

    let depot = Depot::new(spec.authority.as_deref())?;
    let (folder, target) = (home.join("worker"), home.join("code"));
    for new in [&folder, &home.join("bin")] {
        fs::create_dir_all(new).map_err(disk("a folder"))?;
    }
    let mut found = document.provenance.clone();
    if let Some(snapshot) = &mut found.code {
        let path = home.join("code.tar");
        depot.fetch(&format!("/code/{}", snapshot.sha256), "code", &path)?;
        // A container that was ended in the middle of this is run again.
        if target.exists() {
            fs::remove_dir_all(&target).map_err(disk("the code"))?;
        }
        code::unpack("code snapshot", &path, &target).map_err(Trouble::Lasting)?;
        fs::remove_file(&path).map_err(disk("the code"))?;
        snapshot.sha256 = archive::hash(&target).map_err(disk("the code"))?;
    } else {
        fs::create_dir_all(&target).map_err(disk("a folder"))?;
    }
    if let Some(layer) = &document.provenance.layer {
        let content = layered(&depot, home, &layer.hash)?;
        if spec.worker == 0 {
            spec.facts.insert(LAYER_FACT.to_owned(), content);
        }
        // Python keeps what it has compiled beside the modules.
        open_up(&home.join(FOLDER)).map_err(disk("the job's packages"))?;
    }
    let hash = job_hash(&document.spec, &found);
    // Worker 0 speaks for all, unless one found something else than what was submitted.
    if spec.worker == 0 || hash != job_hash(&document.spec, &document.provenance) {
        spec.facts.insert(HASH_FACT.to_owned(), hash);
    }
    let own = std::env::current_exe().map_err(disk("the agent"))?;
    let agent = own.with_file_name("aviflow-agent");
    fs::copy(&agent, home.join("bin/aviflow-agent")).map_err(|e| {
        Trouble::Lasting(format!("the image has no agent at {}: {e}; use Aviflow's own image", agent.display()))
    })?;
    write_hooks(&home.join("python")).map_err(disk("the hooks"))?;
    let text = serde_json::to_vec(&spec).map_err(|e| parse("the worker's spec", e))?;
    fs::write(folder.join(files::SPEC), text).map_err(disk("the worker's spec"))?;
    for open in [&folder, &target] {
        open_up(open).map_err(disk("a folder"))?;
    }
    Ok(())
}

/// Unpacks the layer; gives the SHA-256 of its content, which is what the store says that it is.
fn layered(depot: &Depot, home: &Path, hash: &str) -> Result<String, Trouble> {
    let disk = |e: std::io::Error| Trouble::Passing(format!("the job's packages cannot be written in the pod: {e}"));
    let (path, target) = (home.join("layer.tar"), home.join(FOLDER));
    let said = depot.fetch(&format!("/layer/{hash}"), "layer with the job's packages", &path)?;
    if target.exists() {
        fs::remove_dir_all(&target).map_err(disk)?;
    }
    code::unpack("layer with the job's packages", &path, &target).map_err(Trouble::Lasting)?;
    fs::remove_file(&path).map_err(disk)?;
    let content = archive::hash(&target).map_err(disk)?;
    if said.as_ref() != Some(&content) {
        let said = said.unwrap_or_default();
        return Err(Trouble::Passing(format!("the layer with the job's packages is {content}, and should be {said}")));
    }
    Ok(content)
}

/// Lets everybody write what is in a folder. The job's image runs as anybody, its root without the right to pass over
/// permissions; and this volume is the pod's alone.
fn open_up(folder: &Path) -> std::io::Result<()> {
    fs::set_permissions(folder, Permissions::from_mode(0o777))?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let data = entry.metadata()?;
        if data.is_dir() {
            open_up(&entry.path())?;
        } else if data.is_file() {
            fs::set_permissions(entry.path(), Permissions::from_mode(data.permissions().mode() | 0o666))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_was_unpacked_is_everybodys() {
        let folder = tempfile::tempdir().unwrap();
        let outside = folder.path().join("outside");
        let code = folder.path().join("code");
        fs::create_dir_all(code.join("data")).unwrap();
        for (path, mode) in [(outside.clone(), 0o600), (code.join("data/x"), 0o644), (code.join("run.sh"), 0o755)] {
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
        symlink(&outside, code.join("link")).unwrap();
        open_up(&code).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let check = |path: &str, expected: u32| assert_eq!(mode(&code.join(path)), expected, "{path}");
        check("", 0o777);
        check("data", 0o777);
        check("data/x", 0o666);
        check("run.sh", 0o777);
        assert_eq!(mode(&outside), 0o600, "a link is not followed");
    }
}
