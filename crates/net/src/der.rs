//! The few fields of certificates and certificate requests that this crate reads itself. rustls and ring check
//! everything else.

use time::{Date, Month};

const BIT_STRING: u8 = 0x03;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The version of a certificate, which stands before its number.
const VERSION: u8 = 0xa0;

/// A public key on the curve P-256, as all keys of a federation are.
const P256_KEY: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07";
/// ECDSA with SHA-256.
const ECDSA_SHA256: &[u8] = b"\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02";

/// Values of DER, one after another.
#[derive(Clone, Copy)]
struct Values<'a>(&'a [u8]);

impl<'a> Values<'a> {
    /// The tag of the next value, its content, and the whole value.
    fn next(&mut self) -> Option<(u8, &'a [u8], &'a [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (len, rest) = match first {
            ..=0x7f => (usize::from(first), rest),
            // Longer lengths are none of a certificate.
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 3))?;
                (bytes.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, behind) = rest.split_at_checked(len)?;
        let whole = &self.0[..self.0.len() - behind.len()];
        self.0 = behind;
        Some((tag, content, whole))
    }

    /// The content of the next value, which must have this tag.
    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(found, ..)| *found == tag).map(|(_, content, _)| content)
    }

    fn sequence(&mut self) -> Option<Self> {
        self.expect(SEQUENCE).map(Self)
    }

    fn skip(&mut self, n: usize) -> Option<()> {
        (0..n).try_for_each(|_| self.next().map(drop))
    }

    /// Whole bytes.
    fn bits(&mut self) -> Option<&'a [u8]> {
        self.expect(BIT_STRING)?.strip_prefix(&[0])
    }

    /// A public key on the curve P-256.
    fn key(&mut self) -> Option<&'a [u8]> {
        let mut info = self.sequence()?;
        info.expect(SEQUENCE).filter(|algorithm| *algorithm == P256_KEY)?;
        info.bits()
    }
}

/// What a certificate states about its end and its key.
pub(crate) struct Certificate<'a> {
    /// When it expires, in seconds since 1970.
    pub expires: i64,
    pub key: &'a [u8],
}

impl<'a> Certificate<'a> {
    pub fn read(der: &'a [u8]) -> Option<Self> {
        let mut fields = Values(der).sequence()?.sequence()?;
        if fields.0.first() == Some(&VERSION) {
            fields.skip(1)?;
        }
        // Number, algorithm and issuer.
        fields.skip(3)?;
        let mut validity = fields.sequence()?;
        validity.skip(1)?;
        let (tag, text, _) = validity.next()?;
        // The subject.
        fields.skip(1)?;
        Some(Self { expires: seconds(tag, text)?, key: fields.key()? })
    }
}

/// A certificate request: the key, what the key has signed, and the signature.
pub(crate) struct Request<'a> {
    pub key: &'a [u8],
    pub signed: &'a [u8],
    pub signature: &'a [u8],
}

impl<'a> Request<'a> {
    pub fn read(der: &'a [u8]) -> Option<Self> {
        let mut outer = Values(der);
        let mut fields = outer.sequence()?;
        let (_, content, signed) = fields.next().filter(|(tag, ..)| *tag == SEQUENCE)?;
        fields.expect(SEQUENCE).filter(|algorithm| *algorithm == ECDSA_SHA256)?;
        let signature = fields.bits()?;
        let mut info = Values(content);
        // Version and subject.
        info.skip(2)?;
        let is_whole = outer.0.is_empty() && fields.0.is_empty();
        info.key().filter(|_| is_whole).map(|key| Self { key, signed, signature })
    }
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ` in seconds since 1970. Two digits are years from 1950 to 2049.
fn seconds(tag: u8, text: &[u8]) -> Option<i64> {
    let n_year = match tag {
        UTC_TIME => 2,
        GENERALIZED_TIME => 4,
        _ => return None,
    };
    let is_time = |digits: &&[u8]| digits.len() == n_year + 10 && digits.iter().all(u8::is_ascii_digit);
    let digits = text.strip_suffix(b"Z").filter(is_time)?;
    let number = |at: std::ops::Range<usize>| std::str::from_utf8(digits.get(at)?).ok()?.parse::<u16>().ok();
    let two = |at: usize| number(n_year + 2 * at..n_year + 2 * at + 2).and_then(|n| u8::try_from(n).ok());
    let year = match i32::from(number(0..n_year)?) {
        year @ 0..50 if n_year == 2 => 2000 + year,
        year if n_year == 2 => 1900 + year,
        year => year,
    };
    let date = Date::from_calendar_date(year, Month::try_from(two(0)?).ok()?, two(1)?).ok()?;
    Some(date.with_hms(two(2)?, two(3)?, two(4)?).ok()?.assume_utc().unix_timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PublicKeyData, date_time_ymd};

    #[test]
    fn the_end_and_the_key_of_a_certificate_are_those_it_was_made_with() {
        let key = KeyPair::generate().unwrap();
        for (year, expires) in [(2049, 2_493_072_000), (2050, 2_524_608_000), (2161, 6_027_436_800)] {
            let mut params = CertificateParams::new(vec!["a.example".into()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            let certificate = params.self_signed(&key).unwrap();
            let found = Certificate::read(certificate.der()).unwrap();
            assert_eq!((found.expires, found.key), (expires, key.der_bytes()), "{year}");
        }
    }

    #[test]
    fn a_time_that_no_clock_shows_is_none() {
        assert_eq!(seconds(UTC_TIME, b"700101000001Z"), Some(1));
        assert_eq!(seconds(UTC_TIME, b"491231235959Z"), Some(2_524_607_999));
        for text in
            ["701301000000Z", "700132000000Z", "700101240000Z", "70010100000Z", "7001010000000", "7001010000+1Z"]
        {
            assert_eq!(seconds(UTC_TIME, text.as_bytes()), None, "{text}");
        }
        assert_eq!(seconds(SEQUENCE, b"700101000001Z"), None);
    }

    #[test]
    fn only_requests_with_keys_on_p256_are_read() {
        let request = |key: &KeyPair| CertificateParams::default().serialize_request(key).unwrap().der().to_vec();
        let key = KeyPair::generate().unwrap();
        let der = request(&key);
        assert_eq!(Request::read(&der).unwrap().key, key.der_bytes());
        assert!(Request::read(&[&der[..], &[0]].concat()).is_none(), "bytes behind it");
        for other in [&PKCS_ED25519, &PKCS_ECDSA_P384_SHA384] {
            assert!(Request::read(&request(&KeyPair::generate_for(other).unwrap())).is_none(), "{other:?}");
        }
    }
}
