package guard

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/test/machines/lab"
)

// A client is a program that fetches something from the servers.
type client struct {
	name string
	args []string
	want string // in its output
}

// file writes a file of a server.
func (w *world) file(t *testing.T, path string, content []byte) {
	t.Helper()
	path = w.network.Path(path)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, content, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// zipped returns an archive with files, in order: name, content, ....
func zipped(t *testing.T, files ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	archive := zip.NewWriter(&out)
	for i := 0; i < len(files); i += 2 {
		to, err := archive.Create(files[i])
		if err == nil {
			_, err = to.Write([]byte(files[i+1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// clients fills the servers, and returns the clients.
func (w *world) clients(t *testing.T) []client {
	t.Helper()
	work := w.Mkdir("work", 0)
	hexSum := func(content []byte) string {
		sum := sha256.Sum256(content)
		return hex.EncodeToString(sum[:])
	}

	// apt: a repository whose package comes without TLS, as most do.
	w.sh(`cd "$1"; mkdir -p hello/DEBIAN hello/usr/share/hello; echo hello >hello/usr/share/hello/text
printf 'Package: nt-hello\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@example.com>\nDescription: hello\n' >hello/DEBIAN/control
mkdir -p "$2"; dpkg-deb --root-owner-group --build hello "$2/nt-hello_1.0_all.deb" >&2; cd "$2"; dpkg-scanpackages . >Packages 2>scan.log
mkdir -p "$1/apt/lists/partial" "$1/apt/archives/partial" "$1/apt/etc"; : >"$1/apt/status"
echo "deb [trusted=yes] http://deb.example.org ./" >"$1/apt/sources.list"
echo "deb [trusted=yes] https://deb.example.org/tls/ ./" >>"$1/apt/sources.list"; mkdir -p tls; cp Packages *.deb tls/`, work, w.network.Path("deb.example.org"))
	apt := fmt.Sprintf(`set -e; cd %[1]s/apt; rm -f archives/*.deb lists/*Packages*
o="-o Dir::Etc::SourceList=$PWD/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$PWD/lists -o Dir::State::status=$PWD/status -o Dir::Cache=$PWD -o Dir::Cache::archives=$PWD/archives -o Acquire::https::CAInfo=%[2]s -o Acquire::Languages=none -o APT::Sandbox::User=root -o Acquire::Retries=0 -o Debug::NoLocking=1 -o APT::Update::Error-Mode=any"
apt-get $o update && apt-get $o --yes --download-only install nt-hello && ls archives`, work, w.ca)

	// pip: an index on one host, the files on another.
	const record = "nthello/__init__.py,,\nnthello-1.0.dist-info/METADATA,,\nnthello-1.0.dist-info/WHEEL,,\nnthello-1.0.dist-info/RECORD,,\n"
	wheel := zipped(t, "nthello/__init__.py", "text = 'hello'\n", "nthello-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nthello\nVersion: 1.0\n",
		"nthello-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "nthello-1.0.dist-info/RECORD", record)
	const wheelName = "nthello-1.0-py3-none-any.whl"
	w.file(t, "files.pypi-cdn.example/"+wheelName, wheel)
	w.file(t, "pypi.example.org/simple/nthello/index.html", fmt.Appendf(nil, `<!DOCTYPE html><a href="https://files.pypi-cdn.example/%[1]s#sha256=%[2]s">%[1]s</a>`, wheelName, hexSum(wheel)))
	python := strings.TrimSpace(w.sh(`python3 -c 'import sys; print(sys.executable)'`))

	// npm.
	packed := tarball(t, map[string]string{"package/package.json": `{"name": "nt-hello", "version": "1.0.0"}`, "package/index.js": "module.exports = 'hello'\n"})
	sum := sha512.Sum512(packed)
	w.file(t, "registry.npm.example/tarballs/nt-hello-1.0.0.tgz", packed)
	w.file(t, "registry.npm.example/nt-hello", fmt.Appendf(nil, `{"name": "nt-hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "nt-hello", "version": "1.0.0", "dist": {
"tarball": "https://registry.npm.example/tarballs/nt-hello-1.0.0.tgz", "integrity": "sha512-%s"}}}}`, base64.StdEncoding.EncodeToString(sum[:])))

	// go.
	const module = "example.com/nt/hello"
	w.file(t, "proxy.golang.example/"+module+"/@v/list", []byte("v1.0.0\n"))
	w.file(t, "proxy.golang.example/"+module+"/@v/v1.0.0.info", []byte(`{"Version": "v1.0.0", "Time": "2026-01-01T00:00:00Z"}`))
	w.file(t, "proxy.golang.example/"+module+"/@v/v1.0.0.mod", []byte("module "+module+"\n"))
	w.file(t, "proxy.golang.example/"+module+"/@v/v1.0.0.zip", zipped(t, module+"@v1.0.0/go.mod", "module "+module+"\n", module+"@v1.0.0/hello.go", "package hello\n"))

	// cargo: a sparse index on one host, the crates on another.
	crate := tarball(t, map[string]string{
		"nt-hello-1.0.0/Cargo.toml": "[package]\nname = \"nt-hello\"\nversion = \"1.0.0\"\nedition = \"2021\"\n", "nt-hello-1.0.0/src/lib.rs": "",
	})
	w.file(t, "index.crates.example/config.json", []byte(`{"dl": "https://static.crates.example/crates"}`))
	w.file(t, "index.crates.example/nt/-h/nt-hello", fmt.Appendf(nil, `{"name": "nt-hello", "vers": "1.0.0", "deps": [], "cksum": "%s", "features": {}, "yanked": false}`+"\n", hexSum(crate)))
	w.file(t, "static.crates.example/crates/nt-hello/1.0.0/download", crate)
	w.Write("work/cargo/Cargo.toml", "[package]\nname = \"app\"\nversion = \"1.0.0\"\nedition = \"2021\"\n[dependencies]\nnt-hello = \"1\"\n")
	w.Write("work/cargo/src/main.rs", "fn main() {}\n")
	w.Write("work/cargo/.cargo/config.toml", "[source.crates-io]\nreplace-with = \"mine\"\n[source.mine]\nregistry = \"sparse+https://index.crates.example/\"\n")

	// git, over HTTPS and SSH.
	w.sh(`cd "$1"; git init -q -b main repo; cd repo; echo hello >text; git add .
git -c user.name=a -c user.email=a@example.com commit -q -m one; git clone -q --bare . "$2"; git -C "$2" update-server-info`, work, w.network.Path(sshHost+"/repo.git"))

	// Java and Node.
	w.file(t, "web.example.com/hello", []byte("hello from the web"))
	w.sh(`keytool -importcert -noprompt -alias ca -file "$1" -keystore "$2" -storepass changeit 2>/dev/null`, w.ca, w.Path("trust"))
	w.Write("work/Fetch.java", `import java.net.URI; import java.net.http.*;
public class Fetch { public static void main(String[] a) throws Exception {
System.out.println(HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(a[0])).build(), HttpResponse.BodyHandlers.ofString()).body()); } }
`)
	node := `require("https").get(process.argv[1], r => r.pipe(process.stdout)).on("error", e => { console.error(e); process.exit(1) })`

	// Chromium, whose first request says that the server speaks HTTP/3, and whose later ones fall back to TCP.
	w.file(t, "web.example.com/page.html", []byte(`<!DOCTYPE html><p id="got"></p><script>
for (let i = 0; i < 9; i++) { const x = new XMLHttpRequest(); x.open("GET", "/hello?" + i, false); x.send(); document.getElementById("got").append(x.responseText + i + " ") }
</script>`))
	chromium := []string{
		"timeout", "100", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir=" + w.Path("chromium"),
		"--ignore-certificate-errors-spki-list=" + w.key, "--dump-dom", "https://web.example.com/page.html",
	}

	in := func(script string) []string { return []string{"sh", "-c", "cd " + work + " && " + script} }
	return []client{
		{"apt", []string{"sh", "-c", apt}, "nt-hello_1.0_all.deb"},
		{"pip", in("rm -rf pip && " + python + " -m pip install --disable-pip-version-check --no-cache-dir --target pip --index-url https://pypi.example.org/simple nthello"), "Successfully installed nthello-1.0"},
		{"npm", in("rm -rf npm && mkdir npm && cd npm && npm install --registry https://registry.npm.example --cache ./cache --no-audit --no-fund nt-hello && ls node_modules"), "nt-hello"},
		{"go", in("rm -rf go && mkdir go && cd go && go mod init app && go get " + module + "@latest && cat go.mod && chmod -R u+w $GOPATH && rm -rf $GOPATH"), module + " v1.0.0"},
		{"cargo", in("cd cargo && rm -rf Cargo.lock $HOME/.cargo && cargo fetch 2>&1 && cat Cargo.lock"), `name = "nt-hello"`},
		{"git over https", in("rm -rf clone && git clone https://" + sshHost + "/repo.git clone && cat clone/text"), "hello"},
		{"git over ssh", in("rm -rf clone && git clone ssh://root@" + sshHost + w.network.Path(sshHost+"/repo.git") + " clone && cat clone/text"), "hello"},
		{"curl", []string{"curl", "--silent", "--show-error", "https://web.example.com/hello"}, "hello from the web"},
		{"curl without TLS", []string{"curl", "--silent", "--show-error", "http://web.example.com/hello"}, "hello from the web"},
		{"java", in("java -Djavax.net.ssl.trustStore=" + w.Path("trust") + " -Djavax.net.ssl.trustStorePassword=changeit Fetch.java https://web.example.com/hello"), "hello from the web"},
		{"chromium", chromium, "hello from the web8"},
		{"node", []string{"node", "-e", node, "https://web.example.com/hello"}, "hello from the web"},
	}
}

// run runs all clients.
func (w *world) run(t *testing.T, how string, clients []client) {
	t.Helper()
	for _, c := range clients {
		output, err := w.client(c.args...)
		if err != nil || !strings.Contains(output, c.want) {
			t.Errorf("%s, %s: %v\n%s", c.name, how, err, output)
		}
	}
}

// TestClients runs clients on a host with a guard in mode audit, and then, unchanged, under the policy that `guard learn`
// makes of what was recorded.
func TestClients(t *testing.T) { // G6, G8, G9, G11, G13, G14
	w := newWorld(t)
	clients := w.clients(t)
	w.guard("mode: audit\n")
	w.run(t, "in audit", clients)
	w.agent.End(syscall.SIGTERM)
	learned, err := w.Try("", nil, lab.Program(t, "nametap"), "guard", "learn", w.Path("state/guard.json"))
	if err != nil {
		t.Fatal(err, learned)
	}
	t.Logf("the policy:\n%s", learned)
	if strings.Contains(learned, neighbor) {
		t.Errorf("the policy has a name that was not asked:\n%s", learned)
	}
	w.agent = nil
	w.guard(learned)
	w.Exec("iptables", "-t", "mangle", "-A", "OUTPUT", "-p", "udp", "--dport", "443", "-j", "ACCEPT")
	w.run(t, "enforced", clients)
	t.Logf("UDP to port 443:\n%s", w.Exec("iptables", "-t", "mangle", "-vnL", "OUTPUT"))

	for _, args := range [][]string{
		{"curl", "--silent", "--show-error", "https://" + neighbor + "/"},                                                   // not asked before
		{"curl", "--silent", "--show-error", "--resolve", "web.example.com:443:" + shared, "https://web.example.com/hello"}, // its real address
		{"curl", "--silent", "--show-error", "--insecure", "https://" + shared + "/hello"},
		{"curl", "--silent", "--show-error", "--connect-to", neighbor + ":443:web.example.com:443", "https://" + neighbor + "/"}, // the VIP of another name
	} {
		if output, err := w.client(args...); err == nil {
			t.Errorf("%q succeeds: %s", args, output)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.requests[neighbor] > 0 || w.queries[neighbor+"."] > 0 {
		t.Errorf("%d requests and %d queries for %s", w.requests[neighbor], w.queries[neighbor+"."], neighbor)
	}
}
