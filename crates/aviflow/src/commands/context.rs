//! `login` and `context`.

use super::{App, table};
use crate::cli::{ContextCommand, KubeWayArgs, LoginArgs, SetArgs};
use crate::client::{Client, Security};
use crate::context::{Context, KubeWay, LOCAL, check_service, check_url, config_path, name_of};
use crate::error::{Failure, Result, While};
use crate::home::write_private;
use crate::output::print;
use crate::render::View;
use crate::render::table::{Align, Table};
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};

/// `aviflow login`
pub fn login(app: &App, args: &LoginArgs) -> Result<()> {
    let url = check_url(&args.url)?;
    let token = read(&args.token_file)?;
    let name = args.name.clone().unwrap_or_else(|| name_of(&url));
    check_name(&name)?;
    // A wrong token should be seen now and not with the first job.
    let certificate_authority = args.certificate_authority.as_deref().map(absolute).transpose()?;
    let security = Security::default().file(certificate_authority.as_ref())?;
    Client::secured(&name, &url, Some(token.clone()), &security)?.server()?;
    let path = config_path()?;
    let token_file = path.with_file_name("tokens").join(&name);
    write_private(&token_file, format!("{token}\n").as_bytes())?;
    let mut config = app.config.clone();
    let namespace = app.namespace.clone();
    let (shown, url) = (url.clone(), Some(url));
    let token_file = Some(token_file);
    config.put(Context { name: name.clone(), url, kube: None, token_file, certificate_authority, namespace });
    config.current = Some(name.clone());
    config.write(&path)?;
    print(&format!("logged in to {shown}; context `{name}` is in use\n"));
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().lock().read_to_string(&mut text).or_fail(|| "standard input cannot be read".to_owned())?;
    } else {
        text = std::fs::read_to_string(path).or_fail(|| format!("the token file {} cannot be read", path.display()))?;
    }
    let token = text.trim().to_owned();
    let fine = !token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic());
    if fine {
        Ok(token)
    } else {
        Err(Failure::usage(format!("{} holds no token", path.display())).help("a token is one word"))
    }
}

fn check_name(name: &str) -> Result<()> {
    let plain = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !name.starts_with('.');
    match (plain, name == LOCAL) {
        (true, false) => Ok(()),
        (_, true) => Err(Failure::usage("`local` is the name of this machine's own control plane")
            .help("choose another with --name")),
        (false, _) => {
            Err(Failure::usage(format!("`{name}` is no name of a context"))
                .help("use letters, digits, `-`, `_` and `.`"))
        }
    }
}

/// A context as it is shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    url: Option<String>,
    token_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    current: bool,
}

/// `aviflow context`
pub fn context(app: &App, command: Option<ContextCommand>) -> Result<()> {
    let path = config_path()?;
    let mut config = app.config.clone();
    match command.unwrap_or(ContextCommand::Ls { output: table() }) {
        ContextCommand::Ls { output } => {
            let list = list(app)?;
            app.output.answer(output.format, &list, |view| render(&list, view))
        }
        ContextCommand::Show { output } => {
            let list: Vec<Shown> = list(app)?.into_iter().filter(|c| c.current).collect();
            app.output.answer(output.format, &list.first(), |view| render(&list, view))
        }
        ContextCommand::Use { name } => {
            config.find(&name)?;
            config.current = Some(name.clone());
            config.write(&path)?;
            print(&format!("context `{name}` is in use\n"));
            Ok(())
        }
        ContextCommand::Set(SetArgs { name, url, kube, token_file, certificate_authority }) => {
            check_name(&name)?;
            let url = url.as_deref().map(check_url).transpose()?;
            let kube = way(kube)?;
            let token_file = token_file.as_deref().map(absolute).transpose()?;
            let certificate_authority = certificate_authority.as_deref().map(absolute).transpose()?;
            let namespace = app.namespace.clone();
            let context = Context { name: name.clone(), url, kube, token_file, certificate_authority, namespace };
            let address = address(&context);
            config.put(context);
            config.write(&path)?;
            print(&format!("context `{name}` is {address}\n"));
            Ok(())
        }
        ContextCommand::Rm { name } => {
            check_name(&name)?;
            config.find(&name)?;
            config.contexts.retain(|c| c.name != name);
            config.current = config.current.filter(|c| *c != name);
            config.write(&path)?;
            print(&format!("context `{name}` is forgotten\n"));
            Ok(())
        }
    }
}

/// A path that means the same in every folder.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).or_fail(|| format!("{} is no path", path.display()))
}

/// The way through a cluster, if that is asked for.
fn way(args: KubeWayArgs) -> Result<Option<KubeWay>> {
    if !args.kube {
        return Ok(None);
    }
    check_service(&args.service)?;
    let kubeconfig = args.kubeconfig.as_deref().map(absolute).transpose()?;
    Ok(Some(KubeWay { kubeconfig, context: args.kube_context, service: args.service }))
}

/// Where a context leads, for people.
fn address(context: &Context) -> String {
    match (&context.kube, &context.url) {
        (Some(way), _) => {
            let cluster = way.context.as_deref().map_or_else(String::new, |name| format!(" of {name}"));
            format!("service {}{cluster}", way.service)
        }
        (None, url) => url.clone().unwrap_or_default(),
    }
}

fn list(app: &App) -> Result<Vec<Shown>> {
    let current = app.config.current(app.asked.as_deref());
    app.config.find(&current)?;
    let local = Shown {
        name: LOCAL.to_owned(),
        url: app.home.server()?.map(|s| s.url),
        token_file: Some(app.home.join("token")),
        namespace: None,
        current: current == LOCAL,
    };
    let others = app.config.contexts.iter().map(|c| Shown {
        name: c.name.clone(),
        url: Some(address(c)),
        token_file: c.token_file.clone(),
        namespace: c.namespace.clone(),
        current: current == c.name,
    });
    Ok(std::iter::once(local).chain(others).collect())
}

fn render(list: &[Shown], view: View) -> String {
    let columns = ["used", "context", "address", "namespace"].map(|name| (name, Align::Left));
    let mut table = Table::new(&columns);
    for c in list {
        let address = c.url.as_deref().unwrap_or("(not running)");
        let namespace = c.namespace.as_deref().unwrap_or("default");
        table.row([if c.current { "*" } else { "" }.into(), c.name.as_str().into(), address.into(), namespace.into()]);
    }
    table.render(view.width, view.style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::style::Style;

    #[test]
    fn contexts_are_shown_with_their_namespaces() {
        let shown = |name: &str, url: Option<&str>, namespace: Option<&str>, current| {
            let (url, namespace) = (url.map(str::to_owned), namespace.map(str::to_owned));
            Shown { name: name.to_owned(), url, token_file: None, namespace, current }
        };
        let list =
            [shown("local", None, None, false), shown("prod", Some("https://aviflow.example.com"), Some("nlp"), true)];
        insta::assert_snapshot!(render(&list, View { now: 0, width: None, style: Style::plain() }));
    }
}
