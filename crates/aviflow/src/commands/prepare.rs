//! `worker-prepare`: what runs in a pod before the job's own container.
//!
//! It fetches and unpacks the code, copies the agent and the hooks, and completes the worker's spec with what is
//! known only in the pod. What it says last is the reason that people read; with [`LASTING`] it says that another
//! try will not help.

use crate::client::Security;
use crate::serve::write_hooks;
use aviflow_agent::protocol::{WorkerSpec, files};
use aviflow_api::identity::{HASH_FACT, job_hash};
use aviflow_kube::fate::LASTING;
use aviflow_kube::pod::{DEPOT, DOCUMENT, Document, SPEC, TOKEN};
use aviflow_local::{archive, code};
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// The pause before the depot is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// Tries to fetch the code: the control plane may be away for a while, and a start may take ten minutes.
const TRIES: u32 = 500;

/// Why it could not be done.
enum Trouble {
    /// Another try may help.
    Passing(String),
    /// It will not.
    Lasting(String),
}

/// Prepares a worker below `home`.
pub fn prepare(home: &Path) -> ExitCode {
    match lay_out(home) {
        Ok(()) => ExitCode::SUCCESS,
        Err(trouble) => {
            let (reason, code) = match trouble {
                Trouble::Passing(reason) => (reason, 1),
                Trouble::Lasting(reason) => (reason, LASTING),
            };
            let _ = writeln!(std::io::stderr(), "{reason}");
            ExitCode::from(u8::try_from(code).unwrap_or(1))
        }
    }
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

fn variable(name: &str) -> Result<String, Trouble> {
    std::env::var(name).map_err(|_| Trouble::Lasting(format!("the pod lacks the variable {name}; please report this")))
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

    let (folder, target) = (home.join("worker"), home.join("code"));
    for new in [&folder, &home.join("bin")] {
        fs::create_dir_all(new).map_err(disk("a folder"))?;
    }
    let mut found = document.provenance.clone();
    if let Some(snapshot) = &mut found.code {
        let path = home.join("code.tar");
        fetch(&snapshot.sha256, &path, spec.authority.as_deref())?;
        // A container that was ended in the middle of this is run again.
        if target.exists() {
            fs::remove_dir_all(&target).map_err(disk("the code"))?;
        }
        code::unpack(&path, &target).map_err(Trouble::Lasting)?;
        fs::remove_file(&path).map_err(disk("the code"))?;
        snapshot.sha256 = archive::hash(&target).map_err(disk("the code"))?;
    } else {
        fs::create_dir_all(&target).map_err(disk("a folder"))?;
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

/// Fetches the code from the control plane, which is known by its authority and by nothing else.
fn fetch(sha256: &str, path: &Path, authority: Option<&str>) -> Result<(), Trouble> {
    let url = format!("{}/code/{sha256}", variable(DEPOT)?);
    let config = ureq::Agent::config_builder().http_status_as_error(false);
    let config = match authority {
        Some(pem) => {
            let security = Security::default().known("in the worker's spec", pem).config();
            config.https_only(true).tls_config(security.map_err(|e| Trouble::Lasting(e.message))?)
        }
        None => config,
    };
    let agent = config.build().new_agent();
    let mut last = String::new();
    for _ in 0..TRIES {
        let token = fs::read_to_string(TOKEN)
            .map_err(|e| Trouble::Passing(format!("the pod's token cannot be read at {TOKEN}: {e}")))?;
        let answer = agent.get(&url).header("Authorization", &format!("Bearer {}", token.trim())).call();
        match answer {
            Ok(mut answer) if answer.status() == 200 => {
                let mut copy = || {
                    let mut file = fs::File::create(path)?;
                    std::io::copy(&mut answer.body_mut().as_reader(), &mut file)
                };
                match copy() {
                    Ok(_) => return Ok(()),
                    Err(e) => last = format!("the code could not be fetched whole: {e}"),
                }
            }
            Ok(mut answer) => {
                let said = answer.body_mut().read_to_string().unwrap_or_default();
                last = format!("the control plane gave no code: {}", said.trim());
                if answer.status() == 410 || answer.status() == 403 {
                    return Err(Trouble::Lasting(last));
                }
            }
            Err(e) => last = format!("the control plane cannot be reached at {url}: {e}"),
        }
        std::thread::sleep(PAUSE);
    }
    Err(Trouble::Passing(last))
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
