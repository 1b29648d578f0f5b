//! `apply`, `queue`, `pool`, `policy`, `pause` and `log`.

use super::{App, table};
use crate::cli::{ApplyArgs, Format, LogArgs, Output, PolicyCommand, PoolCommand, QueueCommand, Why};
use crate::client::Client;
use crate::error::{Failure, Result, While};
use crate::output::{note, print};
use crate::render::{acts, queue as render};
use crate::submit::{defaults, draw};
use aviflow_api::admin::{self, AdminDocument, AdminFile, Present, PresentNode};
use aviflow_api::diagnostic::Diagnostic;
use aviflow_api::rest::{Applied, NodeInfo, PoolAction, QueueAction, QueueDelete, QueueInfo, QueueJobs, ServerAction};
use std::io::Read;
use std::path::{Path, PathBuf};

/// `aviflow apply`
pub fn apply(app: &App, args: &ApplyArgs) -> Result<()> {
    let file = args.file.clone().or_else(|| args.path.clone()).unwrap_or_else(|| PathBuf::from("-"));
    let (name, bytes) = read(&file)?;
    let style = app.output.error_style;
    let file = admin::parse_admin(&name, &bytes, &defaults(&app.config).priorities)
        .map_err(|(sources, problems)| Failure::document(draw(&problems, &sources, style)))?;
    let client = app.client()?;
    let present = present(&client, &file)?;
    let found = file.check(&present).map_err(|problems| Failure::document(draw(&problems, &file.sources, style)))?;
    let warnings: Vec<Diagnostic> = file.warnings.iter().cloned().chain(found).collect();
    if !warnings.is_empty() {
        note(draw(&warnings, &file.sources, style).trim_end());
    }
    let mut all: Vec<Applied> = Vec::new();
    for document in file.ordered(&present) {
        let applied = client.apply(document, args.why.reason.clone()).map_err(|failure| {
            let done = all.len();
            let message = format!("{document} is not applied: {}", failure.message);
            let failure = Failure { message, ..failure };
            let (of, rest) = (file.documents.len(), file.documents.len() - done - 1);
            if of == 1 {
                return failure;
            }
            failure.why(format!("{done} of {of} documents were applied before it; {rest} after it were not tried"))
        })?;
        if args.output.format == Format::Table {
            print(&format!("{document} {}\n", applied.what));
            say(&applied, &warnings);
        }
        all.push(applied);
    }
    if args.output.format != Format::Table {
        app.output.answer(args.output.format, &all, |_| String::new())?;
    }
    Ok(())
}

fn read(file: &Path) -> Result<(String, Vec<u8>)> {
    if file == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).or_fail(|| "standard input cannot be read".to_owned())?;
        return Ok(("standard input".to_owned(), bytes));
    }
    let name = file.display().to_string();
    let bytes = std::fs::read(file).map_err(|e| {
        Failure::usage(format!("{name} cannot be read: {e}")).help("name a file with queues, pools or the policy")
    })?;
    Ok((name, bytes))
}

/// What there is to compare with. The policy is compared with nothing.
fn present(client: &Client, file: &AdminFile) -> Result<Present> {
    if file.documents.iter().all(|d| matches!(d.document, AdminDocument::Policy(_))) {
        return Ok(Present::default());
    }
    let queues = client.queues()?.into_iter().map(|queue| queue.document).collect();
    let kubernetes = client.server()?.body == "kubernetes";
    Ok(Present { queues, nodes: client.nodes()?.into_iter().filter_map(here).collect(), kubernetes })
}

/// A node without GPUs has left the pool.
fn here(node: NodeInfo) -> Option<PresentNode> {
    let gpus = u32::try_from(node.gpus.len()).unwrap_or(u32::MAX);
    (gpus > 0).then_some(PresentNode { name: node.name, pool: node.pool, gpu_type: node.gpu_type, gpus })
}

/// Says what the control plane warns of, unless it was said with its place already.
fn say(applied: &Applied, said: &[Diagnostic]) {
    let known = |w: &str| said.iter().any(|d| w.replace('`', "").starts_with(&d.message.replace('`', "")));
    for warning in applied.warnings.iter().filter(|w| !known(w)) {
        note(&format!("warning: {warning}"));
    }
}

/// The document as a file, or the whole answer for a program.
fn document(output: Output, document: Option<AdminDocument>, what: &str) -> Result<bool> {
    if output.format != Format::Yaml {
        return Ok(false);
    }
    let Some(document) = document else {
        return Err(Failure::new(format!("{what} has no document"))
            .help("`-o json` prints what is known of it; `aviflow apply -f FILE` gives it a document"));
    };
    print(&admin::print([&document]));
    Ok(true)
}

/// `aviflow queue`
pub fn queue(app: &App, command: Option<QueueCommand>) -> Result<()> {
    let client = app.client()?;
    match command.unwrap_or(QueueCommand::Ls { output: table() }) {
        QueueCommand::Ls { output } => {
            let queues = client.queues()?;
            app.output.answer(output.format, &queues, |view| render::queues(&queues, view))
        }
        QueueCommand::Show { queue, output } => {
            let info: QueueInfo = client.queue(&queue)?;
            let text = Some(AdminDocument::Queue(info.document.clone()));
            if document(output, text, &format!("queue {queue}"))? {
                return Ok(());
            }
            app.output.answer(output.format, &info, |view| render::queue(&info, view))
        }
        QueueCommand::Hold { queues, why } => {
            each(&client, &queues, &QueueAction::Hold { reason: why.reason }, "held: it takes jobs and starts none")
        }
        QueueCommand::Open { queues, why } => each(&client, &queues, &QueueAction::Open { reason: why.reason }, "open"),
        QueueCommand::Drain { queues, why } => {
            each(&client, &queues, &QueueAction::Drain { reason: why.reason }, "draining: it takes no more jobs")
        }
        QueueCommand::Delete { queue, move_to, leave, why } => {
            let jobs = match (move_to, leave) {
                (Some(to), _) => QueueJobs::Move { to },
                (None, true) => QueueJobs::Leave,
                (None, false) => QueueJobs::Refuse,
            };
            let action = QueueAction::Delete(QueueDelete { jobs, reason: why.reason });
            let applied = client.act_on_queue(&queue, &action)?;
            print(&format!("queue {queue} {} on {}\n", applied.what, client.context()));
            say(&applied, &[]);
            Ok(())
        }
    }
}

fn each(client: &Client, queues: &[String], action: &QueueAction, word: &str) -> Result<()> {
    for queue in queues {
        let applied = client.act_on_queue(queue, action)?;
        let was = if applied.what == "unchanged" { "was already" } else { "is" };
        print(&format!("queue {queue} on {} {was} {word}\n", client.context()));
        say(&applied, &[]);
    }
    Ok(())
}

/// `aviflow pool`
pub fn pool(app: &App, command: Option<PoolCommand>) -> Result<()> {
    let client = app.client()?;
    match command.unwrap_or(PoolCommand::Ls { output: table() }) {
        PoolCommand::Ls { output } => {
            let pools = client.pools()?;
            app.output.answer(output.format, &pools, |view| render::pools(&pools, view))
        }
        PoolCommand::Show { pool, output } => {
            let info = client.pool(&pool)?;
            let text = info.document.clone().map(AdminDocument::Pool);
            if document(output, text, &format!("pool {pool}"))? {
                return Ok(());
            }
            app.output.answer(output.format, &info, |view| render::pool(&info, view))
        }
        PoolCommand::Delete { pool, why } => {
            let applied = client.act_on_pool(&pool, &PoolAction::Delete { reason: why.reason })?;
            print(&format!("the document of pool {pool} {} on {}\n", applied.what, client.context()));
            say(&applied, &[]);
            Ok(())
        }
    }
}

/// `aviflow policy`
pub fn policy(app: &App, command: Option<PolicyCommand>) -> Result<()> {
    let PolicyCommand::Show { output } = command.unwrap_or(PolicyCommand::Show { output: table() });
    let policy = app.client()?.policy()?;
    if document(output, Some(AdminDocument::Policy(policy)), "the policy")? {
        return Ok(());
    }
    app.output.answer(output.format, &policy, |view| render::policy(&policy, view))
}

/// `aviflow pause`
pub fn pause(app: &App, why: Why) -> Result<()> {
    let client = app.client()?;
    client.act_on_server(&ServerAction::Pause { reason: why.reason })?;
    print(&format!("no job starts on {}; what runs goes on (`aviflow unpause` ends this)\n", client.context()));
    Ok(())
}

/// `aviflow unpause`
pub fn unpause(app: &App, why: Why) -> Result<()> {
    let client = app.client()?;
    client.act_on_server(&ServerAction::Resume { reason: why.reason })?;
    print(&format!("jobs start again on {}\n", client.context()));
    Ok(())
}

/// `aviflow log`
pub fn log(app: &App, args: &LogArgs) -> Result<()> {
    let list = app.client()?.acts(args.kind.as_deref(), args.name.as_deref(), args.limit)?;
    if list.is_empty() && args.output.format == Format::Table {
        note("nobody changed such a thing");
        return Ok(());
    }
    app.output.answer(args.output.format, &list, |view| acts::acts(&list, view))
}
