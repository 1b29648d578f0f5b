//! How a control plane on a cluster speaks: which certificates it shows, and whose it takes.
//!
//! Known before its turn to decide comes, as who waits is asked for its health over TLS too. The authority in the
//! cluster is the one thing that is made before.

use crate::cli::KubeArgs;
use crate::error::{Failure, Result};
use crate::output::note;
use aviflow_kube::Client;
use aviflow_kube::authority::{self, SECRET, Trouble};
use aviflow_kube::certified::{self, Clients, Keeper};
use aviflow_tls::listener::Speech;
use aviflow_tls::{ServerName, Shown};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// The Service of the chart.
const SERVICE: &str = "aviflow";

/// Speech of a control plane on a cluster.
pub struct Tls {
    /// To people; none where something before it speaks TLS.
    pub people: Option<Speech>,
    /// To agents, and to pods that fetch their code.
    pub agents: Speech,
    /// Whose client certificates are taken, where some are.
    pub clients: Option<Arc<Clients>>,
    /// The certificate of the own authority in PEM.
    pub authority: String,
}

impl Tls {
    /// As it is asked for; none where nobody is spoken to with it.
    pub fn begin(args: &KubeArgs, client: Option<&Client>, bound: IpAddr, runtime: &Runtime) -> Result<Option<Tls>> {
        // One that only looks has no agents.
        let Some(client) = client.filter(|_| args.tls || !super::kube::observes(args)) else { return Ok(None) };
        let namespace = &args.kube_namespace;
        let authority = runtime.block_on(authority::of(client, namespace));
        let authority = authority.map_err(|trouble| not_to_be_had(&trouble, namespace))?;
        let pem = authority.certificate().to_owned();
        let failed = |why: String| Failure::new(format!("TLS cannot be spoken: {why}"));
        let shown = Shown::new(authority, names(args), addresses(args, bound)).map_err(failed)?;
        let shown = Arc::new(shown);
        let clients = args.tls.then(Arc::<Clients>::default);
        let given = args.tls_secret.as_ref().map(|name| (namespace.clone(), name.clone()));
        let mut keeper = Keeper::new(client.clone(), clients.clone(), shown.clone(), given);
        runtime.block_on(keeper.look(&note));
        runtime.spawn(keeper.run(note));
        let people = args.tls.then(|| Speech::to_people(shown.clone())).transpose().map_err(failed)?;
        let agents = Speech::to_agents(shown).map_err(failed)?;
        Ok(Some(Tls { people, agents, clients, authority: pem }))
    }
}

/// What to do where there is no authority.
fn not_to_be_had(trouble: &Trouble, namespace: &str) -> Failure {
    let help = match trouble {
        Trouble::Forbidden(_) => {
            "apply the Role `aviflow-control-plane` of the manifest, with its binding; `aviflow doctor --kube` \
             checks them"
                .to_owned()
        }
        Trouble::Unanswered(_) => {
            format!("`kubectl -n {namespace} get secret {SECRET}` shows whether the apiserver answers; start it again")
        }
        Trouble::Unusable(_) => format!(
            "restore the Secret from a backup, if there is one that is not over; else delete it, `kubectl -n \
             {namespace} delete secret {SECRET}`, and start again, which makes another. Agents that run do not take a \
             control plane of another authority for theirs: their trainings go on unattended, so delete their pods \
             too, and they start again from their checkpoints"
        ),
    };
    Failure::new(format!("the control plane's own authority is not to be had: {trouble}")).help(help)
}

/// The names by which somebody may come.
fn names(args: &KubeArgs) -> Vec<String> {
    let given = args.tls_name.iter().filter_map(|name| match name {
        ServerName::DnsName(name) => Some(name.as_ref().to_owned()),
        _ => None,
    });
    certified::names_of(SERVICE, &args.kube_namespace).into_iter().chain(given).collect()
}

/// The addresses by which somebody may come: people by the one that is `bound` for them or as they are told, pods by
/// what is advertised, which is where agents connect if nothing else is.
fn addresses(args: &KubeArgs, bound: IpAddr) -> Vec<IpAddr> {
    let listens = [args.agents, args.depot].into_iter().flatten().map(|address| address.ip());
    let given = args.tls_name.iter().filter_map(|name| match name {
        ServerName::IpAddress(ip) => Some(IpAddr::from(*ip)),
        _ => None,
    });
    let outside = args.advertise.into_iter().chain([bound]).chain(listens).chain(given);
    let outside = outside.filter(|ip| !ip.is_unspecified());
    let mut all = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for ip in outside {
        if !all.contains(&ip) {
            all.push(ip);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_may_come_by_names_and_addresses_that_are_given() {
        let given = ["aviflow.example.com", "192.0.2.7", "2001:db8::7"];
        let tls_name = given.map(|name| ServerName::try_from(name).unwrap()).into();
        let args = KubeArgs { tls_name, kube_namespace: "system".to_owned(), ..KubeArgs::default() };
        let names = names(&args);
        assert!(names.iter().any(|name| name == "aviflow.system.svc"), "{names:?}");
        assert_eq!(names.last().map(String::as_str), Some("aviflow.example.com"));
        let expected: Vec<IpAddr> = given[1..].iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(addresses(&args, Ipv4Addr::UNSPECIFIED.into())[2..], expected);
    }

    #[test]
    fn each_trouble_with_the_authority_has_its_remedy() {
        let help = |trouble: fn(String) -> Trouble| not_to_be_had(&trouble("why".to_owned()), "system").help.unwrap();
        assert!(help(Trouble::Forbidden).contains("apply the Role `aviflow-control-plane`"));
        assert!(help(Trouble::Unanswered).contains("`kubectl -n system get secret aviflow-authority`"));
        let unusable = help(Trouble::Unusable);
        assert!(unusable.contains("`kubectl -n system delete secret aviflow-authority`"), "{unusable}");
        assert!(unusable.contains("trainings go on unattended"), "{unusable}");
    }

    #[test]
    fn pods_know_the_control_plane_by_whatever_address_they_are_told() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let check = |advertise: Option<&str>, agents: &str, depot: &str, expected: &[&str]| {
            let args = KubeArgs {
                advertise: advertise.map(ip),
                agents: Some(agents.parse().unwrap()),
                depot: Some(depot.parse().unwrap()),
                ..KubeArgs::default()
            };
            let all = addresses(&args, ip("0.0.0.0"));
            assert_eq!(all[2..], *expected.iter().copied().map(ip).collect::<Vec<_>>());
            let told = super::super::kube::advertised(&args, ip(agents.split(':').next().unwrap())).unwrap();
            assert!(all.contains(&told), "{told} of {all:?}");
        };
        check(None, "192.0.2.7:8081", "0.0.0.0:8082", &["192.0.2.7"]);
        check(None, "192.0.2.7:8081", "192.0.2.8:8082", &["192.0.2.7", "192.0.2.8"]);
        check(Some("10.96.0.7"), "0.0.0.0:8081", "0.0.0.0:8082", &["10.96.0.7"]);
        check(Some("192.0.2.7"), "192.0.2.7:8081", "192.0.2.7:8082", &["192.0.2.7"]);
        let people = addresses(&KubeArgs::default(), ip("192.0.2.9"));
        assert_eq!(people[2..], [ip("192.0.2.9")]);
    }
}
