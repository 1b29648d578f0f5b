//! A submission, made on the client's side: the document read and checked, and
//! everything it names resolved by content.
//!
//! What is sent is complete: the server and the nodes never look at the
//! submitter's files again, so that later changes to them change nothing. Data
//! is the exception, as it stays where it is; its fingerprint is recorded.

pub mod data;
pub mod environment;
pub mod git;
pub mod snapshot;

use crate::cli::SubmitArgs;
use crate::client::Client;
use crate::context::Config;
use crate::error::{Failure, Result, While};
use crate::output::{Output, note};
use crate::render::number::{bytes as amount, count, parse_bytes};
use crate::render::style::Style;
use aviflow_api::check::{LOCAL, PoolFacts, check_pool, check_support, levels_of};
use aviflow_api::diagnostic::{Diagnostic, DiagnosticCode};
use aviflow_api::environment::hex;
use aviflow_api::file::{BASH, Defaults, Document, Options, Places};
use aviflow_api::rest::{NodeInfo, Submit};
use aviflow_api::source::Sources;
use aviflow_api::spec::{Code, JobSpec, Layer};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};

/// What a folder's document is called.
const DOCUMENTS: [&str; 2] = ["job.yaml", "aviflow.yaml"];

/// A submission and the objects that it refers to.
#[derive(Debug)]
pub struct Prepared {
    /// What is sent.
    pub submit: Submit,
    /// What must be in the object store before.
    objects: Vec<Object>,
    /// What is probably not meant, rendered.
    pub warnings: String,
}

#[derive(Debug)]
struct Object {
    sha256: String,
    content: tempfile::NamedTempFile,
}

/// Checks a document against the pool and resolves what it names.
pub fn prepare(client: &Client, loaded: Loaded, args: &SubmitArgs, output: Output) -> Result<Prepared> {
    let limit = snapshot_limit(args)?;
    let body = client.server()?.body;
    let warnings = fits(client, &loaded, &body, output.error_style)?;
    let mut spec = loaded.spec;
    let mut submit = Submit { spec: spec.clone(), provenance: Default::default() };
    let provenance = &mut submit.provenance;
    let mut objects = Vec::new();

    provenance.file = args.document.as_ref().map(|_| loaded.name.clone());
    provenance.client = facts(&spec);
    // Drawn here and not by the training, so that an exact rerun can repeat it.
    spec.seed = spec.seed.or_else(|| Some(draw_seed()));
    data::resolve(&mut spec.data, &loaded.base, &mut provenance.data)?;
    if let Some(environment) = spec.environment.as_ref().filter(|_| body != LOCAL) {
        // The control plane resolves it again; here one that is not there is told before the code is taken.
        let found = client.environment(environment)?;
        if let Some(why) = found.deprecated {
            note(&format!("warning: environment {}@{} is deprecated: {why}", found.name, found.version));
        }
        if let Some(file) = &spec.requirements {
            let lock = Object::new(&environment::read_lock(&loaded.base.join(file), output.error_style)?)?;
            provenance.layer = Some(Layer { lock: lock.sha256.clone(), ..Layer::default() });
            objects.push(lock);
        }
    } else if let Some(environment) = &spec.environment {
        let extra = spec.requirements.as_ref().map(|file| loaded.base.join(file));
        let found = environment::resolve(environment, extra.as_deref(), &loaded.base, client, output.error_style)?;
        spec.environment = Some(format!("{}@{}", found.resolved.name, found.resolved.version));
        provenance.environment = Some(found.resolved);
        for lock in found.locks {
            objects.push(Object::new(&lock)?);
        }
    }
    if let Some(code) = &spec.code {
        let checkout;
        let (folder, code) = match code {
            Code::Folder(folder) => (loaded.base.join(folder), code.clone()),
            Code::Git { git, reference } => {
                checkout = git::checkout(git, reference)?;
                let code = Code::Git { git: git.clone(), reference: checkout.commit.clone() };
                (checkout.folder.path().to_owned(), code)
            }
        };
        spec.code = Some(code);
        let taken = snapshot::take(&folder, limit)?;
        taken.warnings.iter().for_each(|w| note(w));
        note(&format!("code: {} in {}", amount(taken.snapshot.bytes), count(taken.snapshot.files, "file")));
        objects.push(Object { sha256: taken.snapshot.sha256.clone(), content: taken.archive });
        provenance.code = Some(taken.snapshot);
    }
    submit.spec = spec;
    Ok(Prepared { submit, objects, warnings })
}

/// What the pool can never give and what is not acted on there, with its places.
fn fits(client: &Client, loaded: &Loaded, body: &str, style: Style) -> Result<String> {
    let nodes = client.nodes()?;
    let size = |n: &NodeInfo| u32::try_from(n.gpus.len()).unwrap_or(u32::MAX);
    let pool = PoolFacts::count(nodes.iter().map(|n| (n.gpu_type.as_str(), size(n))));
    let pools = client.pools()?;
    let levels = levels_of(pools.iter().map(|p| p.levels.as_slice()));
    let mut found = check_support(&loaded.spec, body, &levels);
    found.extend(check_pool(&loaded.spec, &pool));
    let sources = loaded.document.sources();
    let found = placed(found, &loaded.places, sources);
    if found.iter().any(Diagnostic::is_error) {
        return Err(refused(&found, sources, style));
    }
    let all: Vec<Diagnostic> = loaded.warnings.iter().cloned().chain(found).collect();
    Ok(if all.is_empty() { String::new() } else { draw(&all, sources, style) })
}

impl Prepared {
    /// Uploads the objects that the store does not have.
    pub fn upload(&self, client: &Client) -> Result<()> {
        for object in &self.objects {
            if !client.has_object(&object.sha256)? {
                client.put_object(&object.sha256, object.content.path(), 0)?;
            }
        }
        Ok(())
    }
}

impl Object {
    fn new(content: &[u8]) -> Result<Object> {
        let write = || -> std::io::Result<tempfile::NamedTempFile> {
            let file = tempfile::NamedTempFile::new()?;
            std::fs::write(file.path(), content)?;
            Ok(file)
        };
        let content_file = write().or_fail(|| "a temporary file cannot be written".to_owned())?;
        Ok(Object { sha256: hex(&Sha256::digest(content)), content: content_file })
    }
}

/// A document that was read, and is right by itself.
#[derive(Debug)]
pub struct Loaded {
    /// As a person would name it.
    name: String,
    /// The folder that its paths are relative to.
    base: PathBuf,
    spec: JobSpec,
    document: Document,
    places: Places,
    warnings: Vec<Diagnostic>,
}

/// Reads a document. Needs no control plane, so that a wrong one starts none.
pub fn load(args: &SubmitArgs, config: &Config, style: Style) -> Result<Loaded> {
    let defaults = defaults(config);
    let mut options = options(args);
    let (document, name, base) = match &args.document {
        Some(path) => {
            let file = find_document(path)?;
            let name = file.display().to_string();
            let bytes = std::fs::read(&file).map_err(|e| Failure::usage(format!("{name} cannot be read: {e}")))?;
            let mut document = Document::parse(&name, &bytes).map_err(|(sources, d)| refused(&d, &sources, style))?;
            let applied = document.apply(&options);
            applied.map_err(|d| refused(&d, document.sources(), style))?;
            let base = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
            (document, name, base)
        }
        None => {
            if args.arguments.is_empty() {
                return Err(Failure::usage("there is nothing to run")
                    .help("give a document (`aviflow run job.yaml`) or a command (`aviflow run --nodes 2 -- torchrun train.py`)"));
            }
            options.command.clone_from(&args.arguments);
            if options.code.is_none() && names_a_file(&args.arguments) {
                options.code = Some(".".to_owned());
            }
            let document = Document::from_command(&options).map_err(|(sources, d)| refused(&d, &sources, style))?;
            (document, "the command".to_owned(), PathBuf::from("."))
        }
    };
    let parsed = document.read(&defaults).map_err(|d| refused(&d, document.sources(), style))?;
    let mut spec = parsed.spec;
    if args.document.is_some() {
        append(&mut spec.run, &args.arguments);
    }
    let base = std::path::absolute(&base).or_fail(|| format!("{} is no folder", base.display()))?;
    let missing = missing(&spec, &base);
    if !missing.is_empty() {
        let sources = document.sources();
        return Err(refused(&placed(missing, &parsed.places, sources), sources, style));
    }
    Ok(Loaded { name, base, spec, document, places: parsed.places, warnings: parsed.warnings })
}

/// Files and folders that the document names and that are not there.
fn missing(spec: &JobSpec, base: &Path) -> Vec<Diagnostic> {
    let mut named: Vec<(String, &str, &str)> = Vec::new();
    for (index, data) in spec.data.iter().enumerate() {
        named.extend(data::local(&data.source).map(|path| (format!("data[{index}].source"), path, "data")));
    }
    if let Some(Code::Folder(folder)) = &spec.code {
        named.push(("code".to_owned(), folder, "code"));
    }
    named.extend(spec.requirements.as_ref().map(|file| ("requirements".to_owned(), file.as_str(), "requirements")));
    let gone = |(field, path, what): (String, &str, &str)| {
        let error = std::fs::metadata(base.join(path)).err()?;
        let message = format!("the {what} `{path}` cannot be found: {error}");
        let help = "give a path that is there, relative to the document's folder";
        Some(Diagnostic::error(DiagnosticCode::NotThere, message).field(field).help(help))
    };
    named.into_iter().filter_map(gone).collect()
}

/// Gives problems that name their field the field's place.
fn placed(problems: Vec<Diagnostic>, places: &Places, sources: &Sources) -> Vec<Diagnostic> {
    let place = |d: Diagnostic| match places.value(&d.field) {
        Some(span) => d.at(sources, span),
        None => d,
    };
    problems.into_iter().map(place).collect()
}

/// Arguments for the document's command. A script gets them as `$1`, `$2`, …
fn append(run: &mut Vec<String>, arguments: &[String]) {
    let script = run.len() == BASH.len() + 1 && run.iter().zip(BASH).all(|(word, bash)| word == bash);
    if script && !arguments.is_empty() {
        run.push("bash".to_owned());
    }
    run.extend_from_slice(arguments);
}

/// Whether a command without a document needs the folder it was typed in.
fn names_a_file(command: &[String]) -> bool {
    command.iter().any(|word| Path::new(word).is_relative() && Path::new(word).is_file())
}

fn find_document(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return match path.exists() {
            true => Ok(path.to_owned()),
            false => Err(Failure::usage(format!("there is no file {}", path.display()))
                .help("a command without a document stands behind `--`: `aviflow run -- python train.py`")),
        };
    }
    let found: Vec<PathBuf> = DOCUMENTS.iter().map(|name| path.join(name)).filter(|p| p.is_file()).collect();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::usage(format!("there is no {} in {}", DOCUMENTS.join(" or "), path.display()))
            .help("name the document itself")),
        _ => Err(Failure::usage(format!("there are both {} in {}", DOCUMENTS.join(" and "), path.display()))
            .help("name the one that you mean")),
    }
}

/// What documents need not say.
pub fn defaults(config: &Config) -> Defaults {
    let mut defaults = Defaults::default();
    defaults.queue = config.queue.clone().unwrap_or(defaults.queue);
    defaults.priority = config.priority.clone().unwrap_or(defaults.priority);
    defaults
}

fn options(args: &SubmitArgs) -> Options {
    Options {
        name: args.name.clone(),
        queue: args.queue.clone(),
        priority: args.priority.clone(),
        environment: args.environment.clone(),
        code: args.code.clone(),
        nodes: args.nodes.clone(),
        gpus_per_node: args.gpus_per_node.clone(),
        gpu_type: args.gpu_type.clone(),
        time_limit: args.time_limit.clone(),
        keep_on_failure: args.keep_on_failure.clone(),
        seed: args.seed.clone(),
        env: args.env.clone(),
        set: args.set.clone(),
        ..Options::default()
    }
}

fn snapshot_limit(args: &SubmitArgs) -> Result<Option<u64>> {
    if args.allow_large_snapshot {
        return Ok(None);
    }
    parse_bytes(&args.max_snapshot).map(Some).ok_or_else(|| {
        Failure::usage(format!("`{}` is no size", args.max_snapshot)).help("write it as `--max-snapshot 300MB`")
    })
}

/// Problems as a person reads them.
pub fn draw(diagnostics: &[Diagnostic], sources: &Sources, style: Style) -> String {
    let style = if style.is_coloured() { aviflow_api::render::Style::Color } else { aviflow_api::render::Style::Plain };
    aviflow_api::render::render(diagnostics, sources, style)
}

fn refused(diagnostics: &[Diagnostic], sources: &Sources, style: Style) -> Failure {
    Failure::document(draw(diagnostics, sources, style))
}

/// A number that nobody can know before.
fn draw_seed() -> u64 {
    // The standard library's own source of randomness. 31 bits, as that is what every framework takes.
    std::collections::hash_map::RandomState::new().build_hasher().finish() & 0x7fff_ffff
}

/// Facts of this machine.
fn facts(spec: &JobSpec) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("aviflow".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("os".to_owned(), std::env::consts::OS.to_owned()),
        ("arch".to_owned(), std::env::consts::ARCH.to_owned()),
    ]);
    let uname = rustix::system::uname();
    facts.insert("host".to_owned(), uname.nodename().to_string_lossy().into_owned());
    facts.insert("kernel".to_owned(), uname.release().to_string_lossy().into_owned());
    // An environment says itself which Python it has; without one it is whatever lies on PATH.
    let program = spec.run.first().filter(|p| spec.environment.is_none() && p.starts_with("python"));
    if let Some(version) = program.and_then(|p| python_version(p)) {
        facts.insert("python".to_owned(), version);
    }
    facts
}

fn python_version(program: &str) -> Option<String> {
    let output = std::process::Command::new(program).arg("-V").stdin(std::process::Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    text.strip_prefix("Python ").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn arguments_reach_commands_and_scripts() {
        let mut run = words("python train.py");
        append(&mut run, &words("--lr 1"));
        assert_eq!(run, words("python train.py --lr 1"));
        let mut script: Vec<String> = BASH.iter().map(|w| (*w).to_owned()).chain(["echo $1\n".to_owned()]).collect();
        append(&mut script, &words("a"));
        assert_eq!(script[BASH.len()..], ["echo $1\n", "bash", "a"]);
    }

    fn args(folder: &Path, rest: &[&str]) -> SubmitArgs {
        let mut args =
            SubmitArgs { document: Some(folder.to_owned()), max_snapshot: "1MB".into(), ..SubmitArgs::default() };
        args.set = rest.iter().map(|s| (*s).to_owned()).collect();
        args
    }

    #[test]
    fn a_folders_document_is_found_and_options_go_over_it() {
        let folder = tempfile::tempdir().expect("folder");
        let config = Config { queue: Some("nlp".into()), ..Config::default() };
        let none = load(&args(folder.path(), &[]), &config, Style::plain()).expect_err("none");
        assert!(none.message.contains("no job.yaml or aviflow.yaml"), "{}", none.message);
        std::fs::write(folder.path().join("aviflow.yaml"), "name: a\nrun: python train.py\n").expect("write");
        let loaded =
            load(&args(folder.path(), &["nodes=2", "gpusPerNode=8"]), &config, Style::plain()).expect("loaded");
        assert_eq!((loaded.spec.nodes.min, loaded.spec.gpus_per_node, loaded.spec.queue.as_str()), (2, 8, "nlp"));
        std::fs::write(folder.path().join("job.yaml"), "name: b\nrun: 'true'\n").expect("write");
        let both = load(&args(folder.path(), &[]), &config, Style::plain()).expect_err("both");
        assert!(both.message.contains("both"), "{}", both.message);
    }

    #[test]
    fn what_the_document_names_must_be_there() {
        let folder = tempfile::tempdir().expect("folder");
        let text = "name: a\nrun: cat\ncode: src\ndata: [{name: c, source: ./gone.bin}, {name: d, source: s3://x/y}]\n";
        std::fs::write(folder.path().join("job.yaml"), text).expect("write");
        let failure = load(&args(folder.path(), &[]), &Config::default(), Style::plain()).expect_err("refused");
        let shown = format!("{failure:?}");
        for part in ["job.yaml:3:7", "job.yaml:4:26", "not-there", "gone.bin"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(!shown.contains("s3://x/y` cannot"), "{shown}");
    }

    #[test]
    fn a_wrong_document_is_a_usage_error_with_its_places() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("job.yaml"), "name: a\nrun: 'true'\ngpus_per_node: 8\nnodes: 0\n")
            .expect("write");
        let failure = load(&args(folder.path(), &[]), &Config::default(), Style::plain()).expect_err("refused");
        assert_eq!(failure.code, 2);
        assert!(
            failure.rendered.contains("job.yaml:3:1") && failure.rendered.contains("gpusPerNode"),
            "{}",
            failure.rendered
        );
        assert!(failure.rendered.contains("job.yaml:4:"), "{}", failure.rendered);
    }

    #[test]
    fn nothing_to_run_says_what_to_type() {
        let failure = load(&SubmitArgs::default(), &Config::default(), Style::plain()).expect_err("refused");
        assert_eq!((failure.code, failure.help.is_some()), (2, true));
    }
}
