//! Launchers in a command, and what in their arguments defeats the platform's wiring.
//!
//! The platform sets the variables that torchrun, accelerate and JAX read. A flag wins over a
//! variable, so a flag that was written for one machine breaks the job on several.

use crate::diagnostic::DiagnosticCode;
use crate::file::BASH;
use crate::file::report::Report;
use crate::source::Span;
use crate::spec::{JobSpec, Processes};
use crate::suggest::count;
use crate::yaml::{Node, Value};

/// A word of the command and its place.
struct Token {
    text: String,
    span: Span,
}

pub(super) fn check(report: &mut Report<'_>, spec: &JobSpec, run: &Node) {
    let tokens = tokens(report, run);
    let script = spec.run.iter().zip(BASH).all(|(a, b)| a == b) && spec.run.len() > BASH.len();
    if spec.processes == Processes::PerGpu
        && let Some((name, span)) = launcher(&tokens, script)
    {
        let gpus = spec.gpus_per_node;
        report.error(
            DiagnosticCode::Conflict,
            "processes",
            report.places.value("processes").unwrap_or(span),
            format!("`{name}` starts a process for each GPU, and `processes: perGpu` would start it {gpus} times on each node"),
            format!("remove `processes` and keep `{name}`; or keep `perGpu` and run the script itself, such as `python train.py`"),
        );
    }
    for (i, token) in tokens.iter().enumerate() {
        let next = tokens.get(i + 1);
        wiring(report, spec, token, next);
    }
}

/// The words of a command, or of a script without its comments.
fn tokens(report: &Report<'_>, run: &Node) -> Vec<Token> {
    match &run.value {
        Value::List(items) => items
            .iter()
            .filter_map(|item| item.text().map(|text| Token { text: text.to_owned(), span: item.span }))
            .collect(),
        Value::Scalar { text, .. } => {
            let mut tokens = Vec::new();
            let mut at = 0;
            for line in text.split_inclusive('\n') {
                let mut offset = at;
                for word in line.split_inclusive(char::is_whitespace) {
                    let bare = word.trim_end();
                    if bare.starts_with('#') {
                        break;
                    }
                    if !bare.is_empty() && bare != "\\" {
                        let span = report.within(run, offset..offset + bare.len());
                        tokens.push(Token { text: bare.trim_matches(['"', '\'']).to_owned(), span });
                    }
                    offset += word.len();
                }
                at += line.len();
            }
            tokens
        }
        Value::Map(_) => Vec::new(),
    }
}

/// The launcher that the command starts; in a script, any that it names.
fn launcher(tokens: &[Token], script: bool) -> Option<(&'static str, Span)> {
    let limit = if script { tokens.len() } else { tokens.len().min(4) };
    let text = |i: usize| tokens.get(i).map(|t| t.text.as_str()).unwrap_or_default();
    (0..limit).find_map(|i| {
        let program = text(i).rsplit('/').next().unwrap_or_default();
        let name = match (program, text(i + 1)) {
            ("torchrun", _) => "torchrun",
            ("deepspeed", next) if !next.is_empty() => "deepspeed",
            ("accelerate", "launch") => "accelerate launch",
            ("-m", "torch.distributed.run" | "torch.distributed.launch") => "torch.distributed.run",
            ("-m", "accelerate.commands.launch") => "accelerate launch",
            _ => return None,
        };
        tokens.get(i).map(|t| (name, t.span))
    })
}

fn wiring(report: &mut Report<'_>, spec: &JobSpec, token: &Token, next: Option<&Token>) {
    let (flag, inline) = match token.text.split_once('=') {
        Some((flag, value)) => (flag, Some(value)),
        None => (token.text.as_str(), None),
    };
    let is_flag = flag.starts_with("--");
    let value = inline.or_else(|| next.filter(|_| is_flag).map(|n| n.text.as_str())).unwrap_or_default();
    let span = token.span;
    let several = spec.nodes.max > 1;
    let name = flag.trim_start_matches('-').replace('-', "_").to_ascii_lowercase();
    let variable = inline.is_some() && !is_flag && crate::check::is_reserved(flag);
    let warn = |report: &mut Report<'_>, message: String, help: &str| {
        report.warning(DiagnosticCode::Wiring, "run", span, message, help);
    };
    match name.as_str() {
        "master_addr" | "rdzv_endpoint" if (is_flag || variable) && several && is_local(value) => warn(
            report,
            format!(
                "`{value}` is another machine on each of the {} nodes; they would never find each other",
                spec.nodes.max
            ),
            "remove it; the platform gives the address of the first node",
        ),
        "master_port" if (is_flag || variable) && !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) => {
            warn(
                report,
                format!("port {value} may be taken: two jobs on one node would collide"),
                "remove it; the platform gives a free port",
            )
        }
        "standalone" if is_flag && several => warn(
            report,
            format!("with `--standalone` each of the {} nodes trains for itself", spec.nodes.max),
            "remove it; the platform joins the nodes",
        ),
        "nnodes" | "node_rank" | "machine_rank" | "num_machines" if is_flag && several => warn(
            report,
            format!("`{flag}` wins over what the platform sets"),
            "remove it; the platform sets it from `nodes`",
        ),
        "nproc_per_node" if is_flag => {
            let gpus = spec.gpus_per_node;
            if value.parse::<u32>().is_ok_and(|n| n != gpus) {
                warn(
                    report,
                    format!(
                        "`{flag}` starts {value} processes, and the job has {} on each node",
                        count(gpus.into(), "GPU")
                    ),
                    "remove it; the platform sets it from `gpusPerNode`",
                );
            }
        }
        _ if variable => warn(
            report,
            format!("`{flag}` is set by the platform, from where the job is placed"),
            "remove it; what is set here wins, and is wrong after the next placement",
        ),
        _ => {}
    }
}

fn is_local(value: &str) -> bool {
    let host = value.trim_matches(['[', ']', '"', '\'']);
    ["localhost", "127.0.0.1", "0.0.0.0", "::1"].iter().any(|l| host == *l || host.starts_with(&format!("{l}:")))
}
