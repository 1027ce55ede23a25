package egress

import (
	"crypto/md5"
	"fmt"
	"strings"
	"testing"
)

// startDatabases starts a MariaDB server for each name, on port 3306 of its addresses. Its table shop.items
// has one row, the name. The user shop may connect from everywhere.
func (w *world) startDatabases(names ...string) {
	w.TB.Helper()
	empty := w.Mkdir("empty", 0)
	w.network.Exec("mariadb-install-db", "--no-defaults", "--datadir="+empty, "--user=root", "--skip-test-db", "--innodb-log-file-size=8M")
	for _, name := range names {
		data := empty + "-" + name
		w.network.Exec("cp", "-a", empty, data)
		init := w.Write(name+".sql", `CREATE DATABASE shop;
CREATE TABLE shop.items (name TEXT, value LONGBLOB);
INSERT INTO shop.items VALUES ('`+name+`', '');
CREATE USER shop IDENTIFIED BY 'secret';
GRANT ALL ON shop.* TO shop;
`)
		v4, v6 := addresses(name)
		w.serve(name, "mariadbd", "--no-defaults", "--user=root", "--datadir="+data, "--socket="+data+"/socket",
			"--pid-file="+data+"/pid", "--bind-address="+v4+","+v6, "--port=3306", "--skip-name-resolve", "--init-file="+init,
			"--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M", "--max-allowed-packet=64M")
	}
	for _, name := range names {
		v4, v6 := addresses(name)
		w.await("3306", v4, v6)
	}
}

// query sends statements to a database by its name, with Debian's client, and returns what that prints.
// options are those of resolv.conf.
func (w *world) query(options, name, statements string) string {
	w.TB.Helper()
	return w.client(options, "mariadb", "--no-defaults", "--protocol=tcp", "--host="+name, "--port=3306", "--user=shop", "--password=secret",
		"--batch", "--skip-column-names", "--connect-timeout=30", "--max-allowed-packet=64M", "--execute="+statements, "shop")
}

// E1, E4: two MariaDB servers on port 3306 are reached by their names, over IPv4 and IPv6. The server speaks
// first. Large results and large statements arrive.
func TestDatabases(t *testing.T) {
	w := newWorld(t)
	w.startDatabases(database1, database2)
	for _, family := range []struct{ options, vips string }{{"", "[2001:2:"}, {"no-aaaa", "240."}} {
		for _, name := range []string{database1, database2} {
			if got := w.query(family.options, name, "SELECT name FROM items"); got != name+"\n" {
				t.Errorf("%s, options %q: %q", name, family.options, got)
			}
			s := w.hostStatus(name)
			if !strings.HasPrefix(s.VIP.String(), family.vips) || s.VIP.Port() != 3306 || s.PortsUnknown {
				t.Errorf("%s, options %q: the agent says %+v", name, family.options, s)
			}
		}
	}
	const rows = 200_000
	var want strings.Builder
	for n := range rows {
		fmt.Fprintf(&want, "%d\t%x\n", n+1, md5.Sum(fmt.Append(nil, n+1)))
	}
	got := w.query("", database1, fmt.Sprintf("SELECT seq, MD5(seq) FROM seq_1_to_%d", rows))
	if got != want.String() {
		t.Errorf("a large result: %d bytes of %d, or others; the last ones are %q", len(got), want.Len(), got[max(0, len(got)-100):])
	}
	value := strings.Repeat("0123456789abcdef", 1<<20)
	w.query("", database2, "source "+w.Write("statement", "INSERT INTO items VALUES ('large', '"+value+"')"))
	got = w.query("", database2, "SELECT LENGTH(value), MD5(value) FROM items WHERE name = 'large'")
	if want := fmt.Sprintf("%d\t%x\n", len(value), md5.Sum([]byte(value))); got != want {
		t.Errorf("a large statement: %q, want %q", got, want)
	}
}
