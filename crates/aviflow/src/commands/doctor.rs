//! `doctor`: is everything there that a training needs, and if not, what to do.

use super::App;
use crate::cli::{DoctorArgs, Format};
use crate::client::Client;
use crate::error::{Failure, Result, While};
use crate::output::{machine, print};
use crate::render::View;
use crate::render::number::bytes;
use crate::render::style::Styled;
use aviflow_kube::doctor::collect;
use aviflow_kube::doctor::judge::{Health, judge};
use serde::Serialize;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// Below this an environment does not fit any more.
const SPACE: u64 = 2_000_000_000;

/// One check. One that is well and has a remedy could be better.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Check {
    name: &'static str,
    ok: bool,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Check {
    fn new(name: &'static str, result: std::result::Result<String, (String, String)>) -> Check {
        match result {
            Ok(found) => Check { name, ok: true, found, remedy: None },
            Err((found, remedy)) => Check { name, ok: false, found, remedy: Some(remedy) },
        }
    }
}

/// `aviflow doctor`
pub fn doctor(app: &App, format: Format) -> Result<ExitCode> {
    let mut checks = Vec::new();
    if app.is_local() {
        checks.push(Check::new("home", home(app)));
        checks.push(Check::new("disk", disk(app.home.path())));
        checks.push(Check::new("token", token(&app.home.join("token"))));
        checks.push(Check::new("python", python()));
    }
    match app.client() {
        Ok(client) => server(&client, &mut checks),
        Err(failure) => checks.push(Check::new("control plane", Err(split(failure)))),
    }
    Ok(say(app, format, &checks))
}

/// Prints the checks; the exit code says whether all is well.
fn say(app: &App, format: Format, checks: &[Check]) -> ExitCode {
    match format {
        Format::Table => print(&render(checks, app.output.view())),
        Format::Json | Format::Yaml => print(&machine(format, &checks)),
    }
    ExitCode::from(u8::from(checks.iter().any(|c| !c.ok)))
}

/// `aviflow doctor --kube`
pub fn cluster(app: &App, args: &DoctorArgs) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.or_fail(|| "threads cannot be started".to_owned())?;
    let facts = runtime.block_on(async {
        let client = collect::connect(args.kubeconfig.as_deref()).await?;
        Ok::<_, String>(collect::collect(&client, &args.kube_namespace, &args.priority_class).await)
    });
    let facts = facts.map_err(|e| {
        Failure::new(format!("no Kubernetes cluster can be found: {e}"))
            .help("name its kubeconfig with --kubeconfig, or set KUBECONFIG")
    })?;
    let checks = judge(&facts).into_iter().map(|finding| Check {
        name: finding.name,
        ok: finding.health != Health::Broken,
        found: finding.found,
        remedy: finding.remedy,
    });
    Ok(say(app, args.output.format, &checks.collect::<Vec<_>>()))
}

fn split(failure: Failure) -> (String, String) {
    (failure.message, failure.help.unwrap_or_else(|| "see `aviflow server status`".to_owned()))
}

fn server(client: &Client, checks: &mut Vec<Check>) {
    let info = client.server();
    checks.push(Check::new(
        "control plane",
        match &info {
            Ok(info) => {
                Ok(format!("{} at {}, {} nodes, {} GPUs", client.context(), client.url(), info.nodes, info.gpus))
            }
            Err(failure) => Err(split(failure.clone())),
        },
    ));
    let Ok(info) = info else { return };
    let ours = env!("CARGO_PKG_VERSION");
    let same = info.version == ours;
    let versions = format!("control plane {}, this program {ours}", info.version);
    checks.push(Check::new(
        "versions",
        if same {
            Ok(versions)
        } else {
            Err((versions, "restart it: `aviflow server stop`, `aviflow server start`".to_owned()))
        },
    ));
    let agents = client.agents();
    checks.push(Check::new(
        "agents",
        match agents {
            Ok(agents) => {
                let away: Vec<&str> = agents.iter().filter(|a| !a.connected).map(|a| a.job.as_str()).collect();
                match away.is_empty() {
                    true => Ok(format!("{} connected", agents.len())),
                    false => Err((
                        format!("not connected: {}", away.join(", ")),
                        "they connect by themselves; if not, `aviflow show JOB` says more".to_owned(),
                    )),
                }
            }
            Err(failure) => Err(split(failure)),
        },
    ));
}

fn home(app: &App) -> std::result::Result<String, (String, String)> {
    let path = app.home.path().display().to_string();
    let remedy = "set AVIFLOW_HOME to a folder that you may write".to_owned();
    app.home.create().map_err(|f| (f.message, remedy.clone()))?;
    match tempfile::tempfile_in(app.home.path()) {
        Ok(_) => Ok(path),
        Err(e) => Err((format!("{path} cannot be written: {e}"), remedy)),
    }
}

fn disk(home: &Path) -> std::result::Result<String, (String, String)> {
    let remedy = || format!("free some space in {}; old environments and job folders are the largest", home.display());
    match rustix::fs::statvfs(home) {
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(stat.f_frsize);
            let found = format!("{} free", bytes(free));
            if free < SPACE { Err((found, remedy())) } else { Ok(found) }
        }
        Err(e) => Err((format!("not known: {e}"), remedy())),
    }
}

fn token(path: &Path) -> std::result::Result<String, (String, String)> {
    match path.metadata() {
        Ok(meta) => {
            let mode = meta.permissions().mode() & 0o777;
            if mode & 0o077 == 0 {
                Ok("for this user alone".to_owned())
            } else {
                Err((
                    format!("{} can be read by others (mode {mode:o})", path.display()),
                    format!("remove it and start the control plane again: rm {}", path.display()),
                ))
            }
        }
        Err(_) => Ok("made at the first start".to_owned()),
    }
}

fn python() -> std::result::Result<String, (String, String)> {
    let remedy = "install Python 3.11 or newer with its venv module, such as `apt install python3-venv`".to_owned();
    let run = |code: &str| {
        let output =
            Command::new("python3").args(["-c", code]).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(version) = run("import platform, sys; print(platform.python_version(), sys.executable)") else {
        return Err(("no python3 on PATH".to_owned(), remedy));
    };
    match run("import venv, ensurepip") {
        Some(_) => Ok(version),
        None => Err((format!("{version}, without venv"), remedy)),
    }
}

fn render(checks: &[Check], view: View) -> String {
    let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for c in checks {
        let mark = match (c.ok, &c.remedy) {
            (true, None) => "✓".style(view.style, "32"),
            (true, Some(_)) => "!".style(view.style, "33"),
            (false, _) => "✗".style(view.style, "31"),
        };
        out.push_str(&format!("{mark} {:width$}  {}\n", c.name, c.found));
        if let Some(remedy) = &c.remedy {
            out.push_str(&format!("  {:width$}  {} {remedy}\n", "", "→".style(view.style, "36")));
        }
    }
    let wrong = checks.iter().filter(|c| c.remedy.is_some()).count();
    out.push_str(&match wrong {
        0 => "\neverything is there\n".to_owned(),
        1 => "\n1 thing to do\n".to_owned(),
        n => format!("\n{n} things to do\n"),
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples::view;

    #[test]
    fn each_finding_has_its_remedy() {
        let checks = [
            Check::new("home", Ok("/home/ada/.local/state/aviflow".into())),
            Check::new("python", Err(("no python3 on PATH".into(), "install Python 3.11 or newer".into()))),
            Check::new("control plane", Ok("local at http://127.0.0.1:7000, 2 nodes, 16 GPUs".into())),
            Check {
                name: "labels",
                ok: true,
                found: "pool hgx: no label leaf on hgx0".into(),
                remedy: Some("label them with their domain".into()),
            },
        ];
        insta::assert_snapshot!(render(&checks, view()), @r"
        ✓ home           /home/ada/.local/state/aviflow
        ✗ python         no python3 on PATH
                         → install Python 3.11 or newer
        ✓ control plane  local at http://127.0.0.1:7000, 2 nodes, 16 GPUs
        ! labels         pool hgx: no label leaf on hgx0
                         → label them with their domain

        2 things to do
        ");
    }
}
