//! What a worker is told: its program, variables and folders.
//!
//! Nothing is started here. What a job asks for and this machine cannot give is
//! an error that says which and what to do.

use crate::environments::Environments;
use crate::{LocalConfig, Volumes, plain_component};
use aviflow_agent::protocol::{Endpoint, WorkerSpec};
use aviflow_api::identity::tracking;
use aviflow_api::spec::{JobSpec, Processes};
use aviflow_engine::ports::JobRecord;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// One worker's share of an attempt.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) attempt: u32,
    pub(crate) worker: u32,
    pub(crate) workers: u32,
    pub(crate) node: String,
    pub(crate) slots: Vec<u32>,
}

/// Where the spec's parts come from.
pub(crate) struct Site<'a> {
    pub(crate) config: &'a LocalConfig,
    pub(crate) volumes: &'a Volumes,
    pub(crate) environments: &'a Environments,
    pub(crate) socket: &'a Path,
}

/// The spec of a worker; makes the job's volumes where they are missing.
///
/// # Errors
/// With what is missing and what to do.
pub(crate) fn worker_spec(
    site: &Site<'_>,
    record: &JobRecord,
    share: &Share,
    cwd: PathBuf,
    token: String,
) -> Result<WorkerSpec, String> {
    let spec = &record.spec;
    if let Some(image) = &spec.image {
        return Err(format!("the image {image} cannot run here: this machine runs no containers; use an environment"));
    }
    if spec.run.is_empty() {
        return Err("`run` is empty; give the program to run".to_owned());
    }
    let per_gpu = spec.processes == Processes::PerGpu;
    let ranks = if per_gpu { spec.gpus_per_node.max(1) } else { 1 };
    Ok(WorkerSpec {
        job_id: record.id.0,
        job: format!("{}/{}", record.key.namespace, record.key.name),
        attempt: share.attempt,
        worker: share.worker,
        workers: share.workers,
        node: share.node.clone(),
        token,
        control: Endpoint::Unix(site.socket.to_owned()),
        authority: None,
        host: "127.0.0.1".to_owned(),
        run: spec.run.clone(),
        cwd,
        env: variables(site, record)?,
        ranks,
        first_rank: share.worker * ranks,
        world_size: share.workers * ranks,
        per_gpu,
        gpus_per_node: spec.gpus_per_node,
        slots: share.slots.clone(),
        grace_ms: u64::try_from(site.config.grace.0).unwrap_or(0),
        log_buffer: site.config.log_buffer,
        facts: BTreeMap::new(),
        token_file: None,
        inherit: false,
        prepend: BTreeMap::new(),
        fence_after_ms: None,
    })
}

/// Variables of every rank. Later ones win: the environment's, the job's, secrets, the body's.
fn variables(site: &Site<'_>, record: &JobRecord) -> Result<BTreeMap<String, String>, String> {
    let spec = &record.spec;
    let environment = record.provenance.environment.as_ref();
    // Lines of output are wanted when they are written, not when a buffer is full.
    let mut env = BTreeMap::from([("PYTHONUNBUFFERED".to_owned(), "1".to_owned())]);
    env.extend(tracked(record));
    env.extend(environment.map(|e| e.env.clone()).unwrap_or_default());
    env.extend(spec.env.clone());
    for (variable, reference) in &spec.secrets {
        env.insert(variable.clone(), secret(&site.config.home.join("secrets"), reference)?);
    }
    if let Some(environment) = environment {
        let venv = site.environments.find(&environment.hash).ok_or_else(|| {
            format!(
                "environment {}@{} is not in the cache any more; submit the job again to have it built",
                environment.name, environment.version
            )
        })?;
        prepend(&mut env, "PATH", &venv.join("bin"));
        env.insert("VIRTUAL_ENV".to_owned(), text(&venv)?);
    }
    if let Some(hooks) = &site.config.python_hooks {
        prepend(&mut env, "PYTHONPATH", hooks);
    }
    for (variable, path) in folders(site, record)? {
        env.insert(variable, text(&path)?);
    }
    for data in &spec.data {
        env.insert(format!("AVIFLOW_DATA_{}", shouted(&data.name)), text(&data_path(&data.name, &data.source)?)?);
    }
    if let Some(seed) = spec.seed {
        env.insert("AVIFLOW_SEED".to_owned(), seed.to_string());
    }
    Ok(env)
}

/// What a tracking service knows all attempts by.
fn tracked(record: &JobRecord) -> impl Iterator<Item = (String, String)> {
    let variables = tracking(&record.spec, &record.key, record.id.0, record.submitted.0);
    variables.into_iter().map(|(name, value)| (name.to_owned(), value))
}

/// Folders of the job, made if missing, by the variables that name them.
fn folders(site: &Site<'_>, record: &JobRecord) -> Result<Vec<(String, PathBuf)>, String> {
    let spec: &JobSpec = &record.spec;
    let mut folders = vec![("AVIFLOW_CACHE_DIR".to_owned(), site.config.home.join("cache"))];
    if let Some(checkpoint) = &spec.checkpoint {
        let path = site.volumes.path(record.id, &checkpoint.path).map_err(|e| format!("checkpoint.path {e}"))?;
        folders.push(("AVIFLOW_CHECKPOINT_DIR".to_owned(), path));
    }
    for (n, output) in spec.outputs.iter().enumerate() {
        let path = site.volumes.path(record.id, output).map_err(|e| format!("outputs: {e}"))?;
        if n == 0 {
            folders.push(("AVIFLOW_OUTPUT_DIR".to_owned(), path.clone()));
        }
        folders.push((format!("AVIFLOW_OUTPUT_{n}"), path));
    }
    for (_, path) in &folders {
        fs::create_dir_all(path).map_err(|e| format!("the folder {} cannot be made: {e}", path.display()))?;
    }
    Ok(folders)
}

fn data_path(name: &str, source: &str) -> Result<PathBuf, String> {
    let path = match source.split_once("://") {
        Some(("file", rest)) => match rest.find('/') {
            // A host may stand before the path, and can only be this one.
            Some(at) if at == 0 || &rest[..at] == "localhost" => decode(&rest[at..])?,
            _ => return Err(format!("data `{name}`: {source} names no path on this machine; write file:///path")),
        },
        Some((scheme, _)) => {
            return Err(format!(
                "data `{name}`: {scheme}:// is not supported on the local body yet; fetch it first and give the path"
            ));
        }
        None => PathBuf::from(source),
    };
    if !path.is_absolute() {
        return Err(format!("data `{name}`: {source} is not an absolute path; submit the job again"));
    }
    match fs::metadata(&path) {
        Ok(_) => Ok(path),
        Err(e) => {
            Err(format!("data `{name}`: {} cannot be used: {e}; put it there or correct `source`", path.display()))
        }
    }
}

/// `%20` and the like of a file URL.
fn decode(url_path: &str) -> Result<PathBuf, String> {
    let mut bytes = Vec::with_capacity(url_path.len());
    let mut rest = url_path.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        rest = more;
        if *first == b'%' {
            let code =
                more.get(..2).and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
            bytes.push(code.ok_or_else(|| format!("file://{url_path} has a `%` without two hexadecimal digits"))?);
            rest = &more[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).map(PathBuf::from).map_err(|_| format!("file://{url_path} is no UTF-8"))
}

/// The value behind `name/key`: the file's text without a newline at its end.
fn secret(folder: &Path, reference: &str) -> Result<String, String> {
    let (name, key) = reference
        .split_once('/')
        .filter(|(name, key)| plain_component(name) && plain_component(key))
        .ok_or_else(|| format!("secret `{reference}` is no reference; write name/key"))?;
    let path = folder.join(name).join(key);
    let shown = path.display();
    let mut file = fs::File::open(&path).map_err(|e| {
        format!("secret {reference} cannot be read: {shown}: {e}; put the value into that file (mode 0600)")
    })?;
    let mode = file.metadata().map_err(|e| format!("secret {reference}: {shown}: {e}"))?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "secret {reference} is refused: others may read {shown} (mode {mode:04o}); run `chmod 600 {shown}`"
        ));
    }
    let mut value = String::new();
    file.read_to_string(&mut value)
        .map_err(|e| format!("secret {reference} cannot be a variable: {shown}: {e}; it must be text"))?;
    if value.ends_with('\n') {
        value.pop();
    }
    if value.contains('\0') {
        return Err(format!("secret {reference} cannot be a variable: {shown} holds a zero byte"));
    }
    Ok(value)
}

fn prepend(env: &mut BTreeMap<String, String>, variable: &str, path: &Path) {
    let before = env.get(variable).cloned().or_else(|| std::env::var(variable).ok()).filter(|v| !v.is_empty());
    let path = path.to_string_lossy();
    env.insert(variable.to_owned(), before.map_or_else(|| path.clone().into_owned(), |b| format!("{path}:{b}")));
}

fn text(path: &Path) -> Result<String, String> {
    path.to_str().map(str::to_owned).ok_or_else(|| format!("the path {} is no UTF-8; move it", path.display()))
}

/// As a part of a variable's name: upper-case, everything but letters and digits as `_`.
fn shouted(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_a_path_of_this_machine() {
        let folder = tempfile::tempdir().expect("folder");
        let there = folder.path().join("a b");
        fs::write(&there, "").expect("file");
        let there_text = there.to_str().expect("text");
        assert_eq!(data_path("d", there_text), Ok(there.clone()));
        let url = format!("file://{}", there_text.replace(' ', "%20"));
        assert_eq!(data_path("d", &url), Ok(there.clone()));
        let cases = [
            ("s3://bucket/x", "s3:// is not supported on the local body yet; fetch it first"),
            ("relative", "not an absolute path"),
            ("/nowhere/at/all", "/nowhere/at/all cannot be used"),
            ("file://elsewhere/x", "names no path on this machine"),
            ("file:///a%2", "hexadecimal"),
        ];
        for (source, part) in cases {
            let error = data_path("d", source).expect_err(source);
            assert!(error.contains(part) && error.contains("d") || error.contains(part), "{error}");
        }
    }

    #[test]
    fn names_become_variables() {
        assert_eq!(shouted("fine-web.10B"), "FINE_WEB_10B");
    }

    #[test]
    fn a_secret_is_private_text() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("wandb/key");
        fs::create_dir(folder.path().join("wandb")).expect("folder");
        let error = secret(folder.path(), "wandb/key").expect_err("missing");
        assert!(error.contains("wandb/key") && error.contains("put the value into that file"), "{error}");
        fs::write(&path, "value\n").expect("file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("mode");
        let error = secret(folder.path(), "wandb/key").expect_err("readable by others");
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
        assert_eq!(secret(folder.path(), "wandb/key"), Ok("value".to_owned()));
        for wrong in ["wandb", "../x/y", "wandb/..", "/key", "wandb/"] {
            assert!(secret(folder.path(), wrong).is_err(), "{wrong}");
        }
    }
}
