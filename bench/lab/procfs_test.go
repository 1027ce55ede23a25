package lab

import "testing"

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		text        string
		pid, parent int
	}{
		{readTestdata(t, "stat.txt"), 25376, 25374},
		{"7 (a) b (c) S 1 7 7 0 -1", 7, 1},
		{"8 (with\nnewline) R 2 8", 8, 2},
	} {
		pid, parent, err := parseStat(c.text)
		if err != nil || pid != c.pid || parent != c.parent {
			t.Errorf("%q: %d, %d, %v; want %d, %d", c.text, pid, parent, err, c.pid, c.parent)
		}
	}
	for _, text := range []string{"", "7", "7 (a)", "7 (a) S", "x (a) S 1", "7 (a) S x"} {
		if pid, parent, err := parseStat(text); err == nil {
			t.Errorf("%q: %d, %d, want an error", text, pid, parent)
		}
	}
}

func TestParseSmaps(t *testing.T) {
	text := readTestdata(t, "smaps_rollup.txt")
	for field, want := range map[string]int{"Rss": 4288 << 10, "Pss": 3045 << 10} {
		if got, err := ParseSize(text, field); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", field, got, err, want)
		}
	}
	if got, err := ParseSize(text, "Nothing"); err == nil {
		t.Errorf("unknown field: %d, want an error", got)
	}
}
