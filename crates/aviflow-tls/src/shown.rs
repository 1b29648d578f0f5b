//! Which certificate a client sees: the administrator's where it asks for a name that only that knows, else our own.
//!
//! So whoever comes by address, or by a name of the Service, finds a certificate of the control plane's own
//! authority, whatever the administrator's is good for.

use crate::authority::Authority;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

/// What is shown. It may be changed while connections come in; those that are open stay.
#[derive(Debug)]
pub struct Shown {
    authority: Authority,
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    own: RwLock<Arc<CertifiedKey>>,
    given: RwLock<Option<Arc<CertifiedKey>>>,
}

impl Shown {
    /// Certificates of an authority for these names and addresses.
    ///
    /// # Errors
    /// If one of the names is none.
    pub fn new(authority: Authority, names: Vec<String>, addresses: Vec<IpAddr>) -> Result<Shown, String> {
        let own = authority.server(&names, &addresses, SystemTime::now())?;
        let own = RwLock::new(Arc::new(own));
        Ok(Shown { authority, names, addresses, own, given: RwLock::default() })
    }

    /// The authority.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Signs the own certificate anew, as it does not last.
    ///
    /// # Errors
    /// If the machine gives no random numbers.
    pub fn renew(&self) -> Result<(), String> {
        let own = self.authority.server(&self.names, &self.addresses, SystemTime::now())?;
        *self.own.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(own);
        Ok(())
    }

    /// From now on this is shown under its names.
    pub fn give(&self, pair: CertifiedKey) {
        *self.given.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(pair));
    }

    /// What is shown to a client that asks for a name; one that comes by address asks for none.
    fn to(&self, name: Option<&str>) -> Arc<CertifiedKey> {
        let own = || self.own.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(name) = name else { return own() };
        if self.names.iter().any(|own| own.eq_ignore_ascii_case(name)) {
            return own();
        }
        self.given.read().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_else(own)
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.to(hello.server_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_given_one_is_shown_under_names_that_are_not_ours() {
        let now = SystemTime::now();
        let authority = || Authority::read(&Authority::make(now).unwrap(), now).unwrap();
        let shown = Shown::new(authority(), vec!["aviflow.system.svc".to_owned()], Vec::new()).unwrap();
        let first = shown.to(None);
        let is = |name: Option<&str>, expected: &CertifiedKey| shown.to(name).cert == expected.cert;
        assert!(is(Some("aviflow.example.com"), &first), "there is no other");
        let given = || authority().server(&["aviflow.example.com".to_owned()], &[], now).unwrap();
        let (one, two) = (given(), given());
        for given in [one, two] {
            shown.give(given.clone());
            assert!(is(Some("aviflow.example.com"), &given), "the last one that was given");
            for name in [None, Some("Aviflow.System.svc")] {
                assert!(is(name, &first), "{name:?}");
            }
        }
        shown.renew().unwrap();
        assert!(!is(None, &first), "a new one");
    }
}
