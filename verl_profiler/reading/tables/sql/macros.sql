-- What the derivations share.  Values of JSON objects come as text: one of another type is NULL, and
-- so is a number beyond $number_limit, up to which integers are exact as DOUBLE.

CREATE OR REPLACE MACRO integer_of(object, field) AS
    CASE WHEN try_cast(object->>field AS BIGINT) BETWEEN -$number_limit AND $number_limit
        THEN try_cast(object->>field AS BIGINT) END;

CREATE OR REPLACE MACRO number_of(object, field) AS
    CASE WHEN try_cast(object->>field AS DOUBLE) BETWEEN -$number_limit AND $number_limit
        THEN try_cast(object->>field AS DOUBLE) END;

-- A length of time, from seconds; NULL where it cannot be one.
CREATE OR REPLACE MACRO micros(seconds) AS
    CASE WHEN seconds BETWEEN 0 AND 1e9 THEN try_cast(round(seconds * 1e6) AS BIGINT) END;

-- The values that an aggregate takes; FILTER takes twice as long (duckdb 2.0).
CREATE OR REPLACE MACRO given(condition, value) AS CASE WHEN condition THEN value END;

-- Whether one interval is inside of another, as far as rounded times show it: its middle is, and it sticks
-- out by no more than the rounding.
CREATE OR REPLACE MACRO within(begin_us, end_us, from_us, until_us) AS
    begin_us >= from_us - $nesting_us AND end_us <= until_us + $nesting_us
    AND (begin_us + end_us) // 2 BETWEEN from_us AND until_us;

-- Whether a process, by its header, had this probe in full.
CREATE OR REPLACE MACRO has_probe(header, probe) AS
    json_type(header, '$$.probes.missed.' || probe) IS NULL;
