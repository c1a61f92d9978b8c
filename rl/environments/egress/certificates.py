"""A root certificate per environment, and certificates of hosts signed by it. Keys stay in this process's memory, but for the
moment in which OpenSSL reads them from an anonymous file."""

import datetime
import ipaddress
import os
import ssl
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PEM = serialization.Encoding.PEM
VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT")
NOT_OF_AUTHORITIES = (
    "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only",
)  # fmt: skip


class Authority:
    """The root of one environment; trusted by nobody else."""

    def __init__(self, environment: str, days: int = 30):
        self.days = days
        self.key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"anygress {environment}"[:64])])
        builder = self._builder(name, name, self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **dict.fromkeys(NOT_OF_AUTHORITIES, False))
        builder = builder.add_extension(usage, critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.pem = self.certificate.public_bytes(PEM).decode()
        self.context = lru_cache(maxsize=256)(self._context)

    def _builder(self, subject, issuer, public_key) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=self.days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )

    def sign(self, host: str) -> bytes:
        """PEM of a certificate for this host, its key, and the root."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            name = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        builder = self._builder(subject, self.certificate.subject, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return private + certificate.public_bytes(PEM) + self.pem.encode()

    def _context(self, host: str) -> ssl.SSLContext:
        """To speak as this host, HTTP/1.1 only; a client that asks for another name is refused."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        descriptor = os.memfd_create("anygress")
        try:
            os.write(descriptor, self.sign(host))
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        context.sni_callback = lambda _, name, __: None if name in (None, host) else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return context


def variables(path: str) -> dict[str, str]:
    """Environment variables that make the usual clients trust the root stored at `path`."""
    return dict.fromkeys(VARIABLES, path)


def asked_name(hello: bytes) -> str | None:
    """The server name in the first bytes of a TLS client, None where it names none. ssl.SSLWantReadError: more are needed."""
    names: list[str | None] = []

    def note(_, name, __):
        names.append(name)
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = note
    incoming = ssl.MemoryBIO()
    incoming.write(hello)
    try:
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    except ssl.SSLWantReadError:
        raise
    except ssl.SSLError:
        pass
    return names[0] if names else None
