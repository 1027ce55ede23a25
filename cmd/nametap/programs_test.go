package main

import "testing"

// TestSquatter looks for sockets of other users at the addresses of systemd's. V1.
func TestSquatter(t *testing.T) {
	const heading = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"
	row := func(address, uid, inode string) string {
		return " 1: " + address + " 00000000:0000 07 00000000:00000000 00:00000000 00000000 " + uid + " 0 " + inode + " 2 0000000000000000 0\n"
	}
	for name, test := range map[string]struct{ table, want string }{
		"alone":               {row("0100007F:3ACD", "0", "7"), ""},
		"same address":        {row("0100007F:3ACD", "0", "7") + row("0100007F:3ACD", "1000", "8"), "1000"},
		"another address":     {row("0100007F:3ACD", "0", "7") + row("0200007F:3ACD", "1000", "8"), ""},
		"another port":        {row("00000000:3ACD", "0", "7") + row("0100007F:3ACE", "1000", "8"), ""},
		"below a wildcard":    {row("0100007F:3ACD", "1000", "8") + row("00000000:3ACD", "0", "7"), "1000"},
		"of root":             {row("0100007F:3ACD", "0", "7") + row("0100007F:3ACD", "0", "8"), ""},
		"without the sockets": {row("0100007F:3ACD", "1000", "8") + "\n1:\n", ""},
	} {
		if got, _ := squatter(parseSockets(heading+test.table), map[string]bool{"7": true}); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
