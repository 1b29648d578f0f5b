//! The control plane, and what a person does with it.

use crate::said::printed;
use anyhow::{Context as _, Result, bail, ensure};
use aviflow_image::aviflow::Parts;
use aviflow_testcluster::{Cluster, until};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The image of this project, with which job pods are prepared.
pub const IMAGE: &str = "aviflow.test/aviflow:1";

/// How long anything may take here. Seconds are usual; this is for a busy machine.
pub const LONGEST: Duration = Duration::from_secs(120);

/// A control plane of a cluster. Dropping it kills it; pods stay.
pub struct Plane {
    home: Arc<tempfile::TempDir>,
    name: String,
    kubeconfig: PathBuf,
    address: String,
    registry: String,
    process: Option<Child>,
    extra: Vec<String>,
    variables: Vec<(String, String)>,
}

/// A program that was built before these tests, by the variable that names it.
pub(crate) fn program(variable: &str) -> Result<PathBuf> {
    let path =
        std::env::var_os(variable).with_context(|| format!("{variable} is not set: run `cargo xtask test kube`"))?;
    Ok(PathBuf::from(path))
}

impl Plane {
    /// The image of this project, of the two programs, for the nodes of a cluster.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn image(folder: &Path) -> Result<PathBuf> {
        let archive = folder.join("aviflow.tar");
        let (aviflow, agent) = (program("AVIFLOW_BIN")?, program("AVIFLOW_AGENT_BIN")?);
        // Each node holds a copy in memory.
        let parts = Parts { aviflow: &aviflow, agent: &agent, version: "test", revision: None, small: true };
        aviflow_image::aviflow::image(&parts)?.write(IMAGE, &archive)?;
        Ok(archive)
    }

    /// Starts one, and waits until it answers.
    ///
    /// # Errors
    /// If it does not start; the error quotes what it said.
    pub fn start(cluster: &Cluster) -> Result<Plane> {
        Plane::start_with(cluster, &[])
    }

    /// Starts one with further arguments.
    ///
    /// # Errors
    /// If it does not start; the error quotes what it said.
    pub fn start_with(cluster: &Cluster, extra: &[&str]) -> Result<Plane> {
        Plane::start_as(cluster, "aviflow", extra)
    }

    /// Starts one with the rights of an account of Aviflow's namespace, and further arguments.
    ///
    /// # Errors
    /// If it does not start; the error quotes what it said.
    pub fn start_as(cluster: &Cluster, account: &str, extra: &[&str]) -> Result<Plane> {
        let mut plane = Plane::named(cluster, account, "", extra)?;
        plane.run()?;
        Ok(plane)
    }

    /// One of several, which is not started yet: its lease has this name, as that of a pod has the pod's.
    ///
    /// # Errors
    /// If the account gives no token.
    pub fn named(cluster: &Cluster, account: &str, name: &str, extra: &[&str]) -> Result<Plane> {
        let mut plane = Plane {
            home: Arc::new(tempfile::tempdir()?),
            name: name.to_owned(),
            kubeconfig: PathBuf::new(),
            address: cluster.host_ip(),
            registry: cluster.registry().address().to_owned(),
            process: None,
            extra: extra.iter().map(|e| (*e).to_owned()).collect(),
            variables: Vec::new(),
        };
        plane.kubeconfig = plane.account(cluster, account)?;
        Ok(plane)
    }

    /// Another in the same home folder, as two pods share a volume; it is not started yet.
    #[must_use]
    pub fn beside(&self, name: &str, extra: &[&str]) -> Plane {
        Plane {
            home: Arc::clone(&self.home),
            name: name.to_owned(),
            kubeconfig: self.kubeconfig.clone(),
            address: self.address.clone(),
            registry: self.registry.clone(),
            process: None,
            extra: extra.iter().map(|e| (*e).to_owned()).collect(),
            variables: Vec::new(),
        }
    }

    /// A kubeconfig with the rights of an account of Aviflow's namespace, and no others.
    fn account(&self, cluster: &Cluster, account: &str) -> Result<PathBuf> {
        let token = cluster.kubectl_ok(&["create", "token", account, "-n", "aviflow-system", "--duration=24h"])?;
        let path = self.home.path().join("kubeconfig");
        fs::write(&path, cluster.kubeconfig_with("test", account, token.trim()))?;
        Ok(path)
    }

    /// The kubeconfig that it runs with.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Runs from its next start on with the apiserver at another address.
    ///
    /// # Errors
    /// If its kubeconfig cannot be read or written.
    pub fn reach_at(&mut self, server: &str) -> Result<()> {
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&self.kubeconfig)?)?;
        config["clusters"][0]["cluster"] = json!({"server": server});
        let path = self.home.path().join("kubeconfig.elsewhere");
        fs::write(&path, config.to_string())?;
        self.kubeconfig = path;
        Ok(())
    }

    /// Runs from its next start on with this kubeconfig.
    pub fn set_kubeconfig(&mut self, kubeconfig: PathBuf) {
        self.kubeconfig = kubeconfig;
    }

    /// Its process, if it runs.
    ///
    /// # Errors
    /// If it is not ours to wait for.
    pub fn process(&mut self) -> Result<Option<u32>> {
        let Some(child) = self.process.as_mut() else { return Ok(None) };
        if child.try_wait()?.is_some() {
            self.process = None;
            return Ok(None);
        }
        Ok(Some(child.id()))
    }

    /// Where it keeps its state.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    fn command(&self) -> Result<Command> {
        Ok(self.as_person(Command::new(program("AVIFLOW_BIN")?)))
    }

    fn as_person(&self, mut command: Command) -> Command {
        command
            .env("AVIFLOW_HOME", self.home.path().join("home"))
            .env("AVIFLOW_CONFIG", self.home.path().join("config.yaml"))
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null());
        command
    }

    fn log_path(&self) -> PathBuf {
        self.home.path().join(format!("serve{}.log", self.name))
    }

    /// Variables that it has from its next start on, instead of those of before.
    pub fn set_variables(&mut self, variables: &[(&str, &str)]) {
        self.variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    }

    /// Starts it (again), at the same addresses, and waits until it decides.
    ///
    /// # Errors
    /// If it does not start; the error quotes what it said.
    pub fn run(&mut self) -> Result<()> {
        self.begin()?;
        let ready = self.home.path().join("home/server.json");
        let log = self.log_path();
        let child = self.process.as_mut().context("it was begun")?;
        until("the control plane answers", LONGEST, || {
            if let Some(status) = child.try_wait()? {
                bail!("it ended ({status}): {}", fs::read_to_string(&log)?);
            }
            let text = fs::read_to_string(&ready).unwrap_or_default();
            let ours =
                serde_json::from_str::<Value>(&text).is_ok_and(|v| v["pid"].as_u64() == Some(u64::from(child.id())));
            Ok(ours.then_some(()))
        })
    }

    /// Starts it (again), at the same addresses.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn begin(&mut self) -> Result<()> {
        let file = File::options().create(true).append(true).open(self.log_path())?;
        // It ends with the tests, however they end, as it holds ports that the next need.
        let mut serve = Command::new("setpriv");
        serve.args(["--pdeathsig", "KILL"]).arg(program("AVIFLOW_BIN")?);
        let mut serve = self.as_person(serve);
        serve.args(["serve", "--kube", "--image", IMAGE, "--advertise", &self.address]);
        serve.args(["--plain-registry", &self.registry]);
        if !self.extra.iter().any(|e| e == "--agents") {
            serve.args(["--agents", &format!("{}:7081", self.address), "--depot", &format!("{}:7082", self.address)]);
        }
        if !self.name.is_empty() {
            serve.env("AVIFLOW_POD", &self.name);
        }
        serve.args(&self.extra).envs(self.variables.iter().map(|(name, value)| (name, value)));
        self.process = Some(serve.stdout(file.try_clone()?).stderr(file).spawn()?);
        Ok(())
    }

    /// What it answers at a path, if it listens there: the status, and headers with the body.
    pub fn asked(address: &str, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(address).ok()?;
        stream.set_read_timeout(Some(LONGEST)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let status = answer.split(' ').nth(1)?.parse().ok()?;
        Some((status, answer))
    }

    /// Starts it again where a test has left it dead.
    ///
    /// # Errors
    /// If it does not start; the error quotes what it said.
    pub fn run_if_killed(&mut self) -> Result<()> {
        if self.process.is_none() { self.run() } else { Ok(()) }
    }

    /// Kills it, as a crash would.
    ///
    /// # Errors
    /// If the process is not ours to wait for.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.process.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Asks it to end, as Kubernetes does, and waits until it has.
    ///
    /// # Errors
    /// If it does not run, or does not end.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let child = self.process.as_ref().context("it does not run")?;
        let asked = Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
        ensure!(asked.success(), "`kill` ended with {asked}");
        self.ended()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// If it does not run, or does not end; the error quotes what it said.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        let mut child = self.process.take().context("it does not run")?;
        let ended = until("the control plane has ended", LONGEST, || Ok(child.try_wait()?));
        if ended.is_err() {
            self.process = Some(child);
        }
        ended.with_context(|| self.log())
    }

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Runs a command of a person.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn aviflow(&self, args: &[&str]) -> Result<Output> {
        Ok(self.command()?.args(args).output()?)
    }

    /// Runs a command that is to succeed, and returns what it printed.
    ///
    /// # Errors
    /// If it fails; the error quotes it.
    pub fn ok(&self, args: &[&str]) -> Result<String> {
        printed(args, &self.aviflow(args)?)
    }

    /// What a command says as JSON.
    ///
    /// # Errors
    /// If it fails or says something else.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.ok(&[args, &["-o", "json"]].concat())?)?)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
