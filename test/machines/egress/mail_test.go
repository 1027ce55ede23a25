package egress

import (
	"fmt"
	"net"
	"os"
	"os/user"
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// eximConf is a configuration of Exim that accepts every message and appends it to a file. Its
// parameters are the name of the host, a directory of Exim's user, and files of a certificate and its
// key.
const eximConf = `
primary_hostname = %[1]s
spool_directory = %[2]s
log_file_path = %[2]s/%%slog
local_interfaces = <; 0.0.0.0 ; ::0
daemon_smtp_ports = 25
host_lookup =
rfc1413_query_timeout = 0s
keep_environment =
tls_advertise_hosts = *
tls_certificate = %[3]s
tls_privatekey = %[4]s
acl_smtp_rcpt = accept
begin acl
begin routers
all:
  driver = accept
  transport = file
begin transports
file:
  driver = appendfile
  file = %[2]s/box
  user = Debian-exim
`

// startMail starts Exim, and returns its directory and its certificate.
func (w *world) startMail() (dir, cert string) {
	w.TB.Helper()
	account, err := user.Lookup("Debian-exim")
	if err != nil {
		w.TB.Fatal(err)
	}
	uid, err := strconv.Atoi(account.Uid)
	if err != nil {
		w.TB.Fatal(err)
	}
	dir = w.Mkdir("exim", uid)
	cert, key := w.certificate(mail)
	conf := w.Write("exim.conf", fmt.Sprintf(eximConf, mail, dir, cert, key))
	w.serve("exim4", "exim4", "-C", conf, "-bdf")
	v4, v6 := addresses(mail)
	w.await("25", v4, v6)
	return dir, cert
}

// greeting returns the first line that a server of the mesh sends, and its VIP. options are those of
// resolv.conf.
func (w *world) greeting(options, name, port string) (line, vip string) {
	w.TB.Helper()
	vip, _, _ = strings.Cut(w.client(options, "getent", "ahosts", name), " ")
	line, conn, err := w.Greeting(net.JoinHostPort(vip, port))
	if err != nil {
		w.TB.Fatal(err)
	}
	conn.Close()
	return line, vip
}

// E1, E4: Exim greets before the client sends a byte. curl then sends it a message in a dialogue that
// changes to TLS in the middle (STARTTLS).
func TestMail(t *testing.T) {
	w := newWorld(t)
	dir, cert := w.startMail()
	for _, options := range []string{"", "no-aaaa"} {
		got, vip := w.greeting(options, mail, "25")
		if want := "220 " + mail + " ESMTP Exim"; !strings.HasPrefix(got, want) {
			t.Errorf("%s greets with %q, want %q", vip, got, want)
		}
	}

	letter := w.Write("letter", "Subject: by name\r\n\r\n"+strings.Repeat("A line of the letter.\r\n", 100_000))
	w.client("", "curl", "--silent", "--show-error", "--max-time", "50", "--ssl-reqd", "--cacert", cert, "smtp://"+mail+":25/client.example.net",
		"--mail-from", "sender@example.net", "--mail-rcpt", "reader@example.com", "--upload-file", letter)
	var box string
	wait.Until(t, "the message is delivered", func() bool {
		text, err := os.ReadFile(dir + "/box")
		box = string(text)
		return err == nil && strings.HasSuffix(box, "letter.\n\n")
	})
	for _, want := range []string{"From sender@example.net ", "with esmtps ", "Subject: by name\n"} {
		if !strings.Contains(box, want) {
			t.Errorf("want %q in the message:\n%.1000s", want, box)
		}
	}
	if got := strings.Count(box, "A line of the letter.\n"); got != 100_000 {
		t.Errorf("the message has %d lines, want 100000", got)
	}
}
