//! `cargo xtask image`: the image of the control plane and the agent, built and pushed without Docker.

use crate::control::{self, Profile};
use crate::proc::{capture, cargo, command, must, target};
use anyhow::{Context as _, Result, bail};
use aviflow_image::aviflow::{Parts, image};
use aviflow_image::oci::Image;
use aviflow_image::registry::{Reference, Registry};
use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "\
usage: cargo xtask image [OPTIONS]

  --output PLACE    where the image is written: an archive, if the name ends with .tar, else a folder of the OCI
                    layout (default: image.tar in the target folder, unless it is pushed)
  --push REFERENCE  push it as REGISTRY/NAME:TAG; a password is that of `docker login` or `podman login`
  --plain-http      the registry speaks no HTTPS
  --debug           programs as tests have them, built sooner and slower
";

/// What is asked for.
#[derive(Default)]
struct Options {
    output: Option<PathBuf>,
    push: Option<Reference>,
    plain_http: bool,
    debug: bool,
}

/// Builds it. Its digest is the last line of standard output; of one that is pushed, the reference.
pub fn run(args: &[String]) -> Result<u8> {
    let mut options = Options::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value\n\n{USAGE}"));
        match arg.as_str() {
            "--output" => options.output = Some(value()?.into()),
            "--push" => options.push = Some(Reference::parse(value()?)?),
            "--plain-http" => options.plain_http = true,
            "--debug" => options.debug = true,
            other => bail!("unknown argument `{other}`\n\n{USAGE}"),
        }
    }
    if !cfg!(target_os = "linux") {
        bail!("the image is made of programs of Linux, and this machine builds others; run it on Linux");
    }
    let image = made(if options.debug { Profile::Dev } else { Profile::Release })?;
    let written = match (&options.output, &options.push) {
        (None, Some(_)) => None,
        (None, None) => Some(target()?.join("image.tar")),
        (Some(place), _) => Some(place.clone()),
    };
    let name = options.push.as_ref().map_or_else(
        || format!("aviflow:{}", env!("CARGO_PKG_VERSION")),
        |reference| format!("{}/{}:{}", reference.host, reference.name, reference.tag),
    );
    if let Some(place) = written {
        let digest = write(&image, &name, &place)?;
        eprintln!("{name} is in {}", place.display());
        if options.push.is_none() {
            println!("{digest}");
        }
    }
    if let Some(Reference { host, name: repository, tag }) = &options.push {
        let archive = target()?.join(format!("image-{}.tar", std::process::id()));
        image.write(&name, &archive)?;
        let pushed = Registry::at(host, options.plain_http).push_tagged(&archive, repository, tag);
        std::fs::remove_file(&archive)?;
        println!("{}", pushed.with_context(|| format!("{name} could not be pushed"))?);
    }
    Ok(0)
}

/// The image of the programs, which are built.
fn made(profile: Profile) -> Result<Image> {
    let (aviflow, agent) = (control::build(profile)?, static_agent(profile)?);
    // A commit says nothing of what was changed since.
    let changed = capture(command("git").args(["status", "--porcelain"])).map_or(true, |said| !said.is_empty());
    let revision = capture(command("git").args(["rev-parse", "HEAD"])).ok().filter(|_| !changed);
    image(&Parts {
        aviflow: &aviflow,
        agent: &agent,
        version: env!("CARGO_PKG_VERSION"),
        revision: revision.as_deref().map(str::trim),
        small: profile == Profile::Dev,
    })
}

fn write(image: &Image, name: &str, place: &Path) -> Result<String> {
    if place.extension().is_some_and(|extension| extension == "tar") {
        return image.write(name, place);
    }
    // What an earlier image left there would stay in it.
    if place.join("oci-layout").exists() {
        std::fs::remove_dir_all(place).with_context(|| format!("{} cannot be removed", place.display()))?;
    }
    image.write_folder(name, place)
}

/// The agent as it is copied into containers: without libraries of its own, so that it runs in any image.
pub fn static_agent(profile: Profile) -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--quiet", "--locked", "--package", "aviflow-agent"]);
    if profile == Profile::Release {
        build.arg("--release");
    }
    Ok(target()?.join(static_agent_of(build)?))
}

/// Runs what builds the agent, statically; returns where it then is in the target folder.
pub fn static_agent_of(mut build: Command) -> Result<PathBuf> {
    let host = capture(command("rustc").arg("-vV"))?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    let folder = if build.get_args().any(|arg| arg == "--release") { "release" } else { "debug" };
    // A target that is named keeps the flags from programs that the build itself runs.
    must(build.args(["--target", host]).env("RUSTFLAGS", "-C target-feature=+crt-static"))?;
    Ok(Path::new(host).join(folder).join("aviflow-agent"))
}
