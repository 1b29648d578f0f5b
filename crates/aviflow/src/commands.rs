//! What each command does.

mod account;
mod act;
mod admin;
mod check;
mod context;
mod copy;
mod depot;
mod dev;
mod doctor;
mod drain;
mod exec;
mod forward;
mod layer;
mod logs;
mod look;
mod platform;
mod prepare;
mod rerun;
mod run;
mod server;
mod simulate;
mod stacks;
mod store;
mod top;

pub use forward::Ports;
pub use server::goes_on;

use crate::cli::{Cli, Command, Format, Global};
use crate::client::Client;
use crate::context as contexts;
use crate::error::Result;
use crate::home::Home;
use crate::output::{Output, print};
use clap::CommandFactory;
use std::process::ExitCode;

/// What every command needs.
pub struct App {
    /// The local control plane's folder.
    pub home: Home,
    /// Known control planes and defaults.
    pub config: contexts::Config,
    /// The context that was asked for.
    pub asked: Option<String>,
    /// The namespace that was asked for.
    pub namespace: Option<String>,
    /// The streams.
    pub output: Output,
}

impl App {
    fn new(global: &Global, output: Output) -> Result<App> {
        let config = contexts::Config::read(&contexts::config_path()?)?;
        let asked = global.context.clone().filter(|c| !c.is_empty());
        let namespace = global.namespace.clone().filter(|n| !n.is_empty());
        Ok(App { home: Home::find()?, config, asked, namespace, output })
    }

    /// The control plane to speak to.
    pub fn client(&self) -> Result<Client> {
        let client = contexts::connect(&self.home, &self.config, self.asked.as_deref())?;
        Ok(match &self.namespace {
            Some(namespace) => client.in_namespace(Some(namespace.clone())),
            None => client,
        })
    }

    /// Whether the control plane of this machine is meant.
    pub fn is_local(&self) -> bool {
        self.config.current(self.asked.as_deref()) == contexts::LOCAL
    }
}

/// Runs a command and says with which code to exit.
pub fn dispatch(cli: Cli, output: Output) -> Result<ExitCode> {
    let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
    // These need no folder and no configuration.
    let command = match cli.command {
        Command::Agent { folder } => return Ok(aviflow_agent::run(&folder)),
        Command::NodeProbe { gpus, reach, virtual_gpus } => return Ok(check::probe(gpus, &reach, virtual_gpus)),
        Command::Placeholder => return Ok(prepare::hold()),
        Command::WorkerPrepare { folder } => return Ok(prepare::prepare(&folder)),
        Command::LayerFetch { folder } => return Ok(layer::fetch(&folder)),
        Command::LayerStore { folder } => return Ok(layer::store(&folder)),
        Command::Completion { shell } => {
            let mut out = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "aviflow", &mut out);
            print(&String::from_utf8_lossy(&out));
            return Ok(ExitCode::SUCCESS);
        }
        Command::Version => {
            print(concat!("aviflow ", env!("CARGO_PKG_VERSION"), "\n"));
            return Ok(ExitCode::SUCCESS);
        }
        Command::Serve(args) => return done(crate::serve::serve(*args, output)),
        Command::Simulate(args) => return done(simulate::simulate(&args, output)),
        other => other,
    };
    let app = App::new(&cli.global, output)?;
    match command {
        Command::Run(args) => run::run(&app, args),
        Command::Rerun(args) => rerun::rerun(&app, &args),
        Command::Exec(args) => exec::exec(&app, args),
        Command::Dev(args) => dev::dev(&app, args),
        Command::Stacks(args) => done(stacks::stacks(&app, &args)),
        Command::Forward(args) => done(forward::forward(&app, &args)),
        Command::Plan(args) => done(run::plan(&app, &args)),
        Command::Ls(args) => done(look::ls(&app, &args)),
        Command::Show(args) => done(look::show(&app, &args)),
        Command::Top(args) => done(top::top(&app, &args)),
        Command::Logs(args) => done(logs::logs(&app, args)),
        Command::Cancel(args) => done(act::cancel(&app, &args.jobs)),
        Command::Suspend(args) => done(act::suspend(&app, args)),
        Command::Resume(args) => done(act::resume(&app, args)),
        Command::Hold(args) => done(act::hold(&app, args)),
        Command::Release(args) => done(act::release(&app, args)),
        Command::Update(args) => done(act::update(&app, args)),
        Command::Cp(args) => done(copy::cp(&app, &args)),
        Command::Node { command } => done(platform::node(&app, command)),
        Command::Queue { command } => done(admin::queue(&app, command)),
        Command::Apply(args) => done(admin::apply(&app, &args)),
        Command::Pool { command } => done(admin::pool(&app, command)),
        Command::Policy { command } => done(admin::policy(&app, command)),
        Command::Pause(why) => done(admin::pause(&app, why)),
        Command::Unpause(why) => done(admin::unpause(&app, why)),
        Command::Log(args) => done(admin::log(&app, &args)),
        Command::Env { command } => done(platform::env(&app, command)),
        Command::Observed { output } => done(platform::observed(&app, output.format)),
        Command::Usage(args) => done(account::usage(&app, &args)),
        Command::Doctor(args) if args.kube => doctor::cluster(&app, &args),
        Command::Doctor(args) => doctor::doctor(&app, args.output.format),
        Command::Server { command } => server::server(&app, command),
        Command::Store { command } => done(store::store(&app, command)),
        Command::Login(args) => done(context::login(&app, &args)),
        Command::Context { command } => done(context::context(&app, command)),
        Command::Agent { .. }
        | Command::NodeProbe { .. }
        | Command::Placeholder
        | Command::WorkerPrepare { .. }
        | Command::LayerFetch { .. }
        | Command::LayerStore { .. }
        | Command::Completion { .. }
        | Command::Version
        | Command::Serve(_)
        | Command::Simulate(_) => Ok(ExitCode::SUCCESS),
    }
}

/// The usual form of an answer.
fn table() -> crate::cli::Output {
    crate::cli::Output { format: Format::Table }
}
